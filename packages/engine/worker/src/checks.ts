/** What a start of the engine worker would find, looked at without one: nothing is bound, and of the model no weight is read. */
import { checkSocketFolder, type EngineWorkerConfig, readGroup, readKvEventsCurve } from '@kvtier/config';
import { checkModelFolder } from '@kvtier/executor';
import type { Check } from '@kvtier/telemetry';
import { renewedTls } from '@kvtier/wire/tls';
import { readStopTokenIds } from './stop-ids.ts';
import { readTextDigests } from './text-files.ts';

const onProblem = (): void => {}; // nobody waits for a second look at the files

export function engineWorkerChecks(config: EngineWorkerConfig): readonly Check[] {
  const { modelDir, tls, kvEvents, membership } = config;
  return [
    () => checkSocketFolder('listen', config.listen),
    () => readGroup(config.group),
    async () => readStopTokenIds(modelDir, (await checkModelFolder(modelDir)).vocabSize),
    () => readTextDigests(modelDir),
    () => tls && renewedTls(tls, { place: 'tls', reloadMs: tls.reloadMs, onProblem }).close(),
    () => kvEvents && readKvEventsCurve(kvEvents, onProblem),
    async () => membership && (await import('@kvtier/membership')).checkList(membership.redis, 'membership.redis'),
  ];
}
