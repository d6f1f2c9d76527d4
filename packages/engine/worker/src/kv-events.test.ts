import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { kvEventsSchema, parseConfig } from '@kvtier/config';
import type { EngineStats } from '@kvtier/scheduler';
import { createLogger } from '@kvtier/telemetry';
import { afterAll, expect, it } from 'vitest';
import { startKvEvents } from './kv-events.ts';
import { WorkerMetrics } from './metrics.ts';

const folder = mkdtempSync(join(tmpdir(), 'kvtier-ev-'));
afterAll(() => rmSync(folder, { recursive: true }));
const zeros = new Proxy({} as EngineStats, { get: () => 0 });
const logger = createLogger('test', 'silent');
const config = (more: object = {}) => {
  const plain = { endpoint: `ipc://${folder}/pub`, replayEndpoint: `ipc://${folder}/replay`, ...more };
  return parseConfig(kvEventsSchema, plain, 'test');
};
const allowedClientKeys = ['rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7'];

it('publishes as configured, and counts', async () => {
  const publisher = await startKvEvents(config(), logger);
  try {
    publisher.publish([{ type: 'AllBlocksCleared' }]);
    const metrics = new WorkerMetrics({ engine: () => zeros, connector: null, events: publisher });
    expect(await metrics.text()).toMatch(/^kvtier_kv_events_total\{count="publishedBatches"\} 1$/m);
  } finally {
    await publisher.close();
  }
});

it('reads the secret key from its file', async () => {
  const secretKeyFile = join(folder, 'key');
  const curve = { secretKeyFile, allowedClientKeys };
  await expect(startKvEvents(config({ curve }), logger)).rejects.toThrow(/key: cannot be used \(ENOENT/);
  writeFileSync(secretKeyFile, 'not a key\n', { mode: 0o600 });
  await expect(startKvEvents(config({ curve }), logger)).rejects.toThrow(/key: holds a line that is no CURVE key/);
  writeFileSync(secretKeyFile, 'D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs\n', { mode: 0o600 });
  await (await startKvEvents(config({ curve }), logger)).close();
});
