/** What a start of the coordinator would find, looked at without one: nothing is bound, and no worker, server or API is asked. */
import { ApiKeys } from '@kvtier/api-server';
import { type CoordinatorConfig, readEventAccess, type ServerTlsConfig, WorkerAccess } from '@kvtier/config';
import { checkDiscovery } from '@kvtier/registry';
import type { Check } from '@kvtier/telemetry';
import { renewedTls } from '@kvtier/wire/tls';
import { discoveryOf } from './discovery-of.ts';
import { checkTokenizers } from './tokenizer-folders.ts';

const onProblem = (): void => {}; // nobody waits for a second look at the files

/** @param warn of what a start warns of */
export function coordinatorChecks(config: CoordinatorConfig, warn: (line: string) => void): readonly Check[] {
  const { access, operations, endpointPicker, planner } = config;
  const tlsOf = (place: string, files: ServerTlsConfig | null | undefined) => (): void =>
    files ? renewedTls(files, { place, reloadMs: files.reloadMs, onProblem }).close() : undefined;
  const keysOf = (key: 'apiKeysFile' | 'adminKeysFile') => (): void => {
    const file = config[key];
    if (file !== null) new ApiKeys(file, { key, onProblem }).close();
  };
  return [
    () => checkDiscovery(discoveryOf(config)),
    () => checkTokenizers(config.tokenizers, warn),
    () => access && new WorkerAccess(access, onProblem).close(),
    () => readEventAccess(config.kvEvents, onProblem),
    tlsOf('tls', config.tls),
    keysOf('apiKeysFile'),
    keysOf('adminKeysFile'),
    tlsOf('operations.tls', operations?.tls),
    tlsOf('endpointPicker.tls', endpointPicker?.tls),
    tlsOf('planner.scaler.tls', planner.scaler?.tls),
  ];
}
