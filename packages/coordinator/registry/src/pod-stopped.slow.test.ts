/** A pod that is stopped while its answers stream: noticed as soon as one that has nothing to do, with the limits of every coordinator. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { Watch } from '@kvtier/runtime';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, expect, it, vi } from 'vitest';
import { stopProcess } from '../../../../infra/stopped.ts';
import { threadWaits, waitedBetween } from '../../../../test/e2e/cpu-waits.ts';
import { Fleet } from './fleet.ts';
import { SpokenDiscovery } from './testing/rig.ts';

const patience = { timeout: 20_000, interval: 2 };
// As the fleet's: what stands still with this process is no silence.
const clock = new Watch(10, () => {});
const never = new AbortController().signal;
const program = fileURLToPath(new URL('./testing/streaming-pod.ts', import.meta.url));
const fleet = new Fleet({ logger: createLogger('pod-stopped-test', 'silent') });
const children: ChildProcess[] = [];
afterEach(async () => {
  clock.stop();
  await fleet.close();
  for (const child of children) child.kill('SIGKILL');
});

it('is silent within 1.2 s, twice in a row, and ready again when it goes on', async () => {
  const child = spawn(process.execPath, ['--import', 'tsx', program], { stdio: ['ignore', 'pipe', 'inherit'] });
  children.push(child);
  const [line] = (await once(child.stdout, 'data')) as [Buffer];
  const discovery = new SpokenDiscovery();
  await fleet.start(discovery);
  discovery.say({ name: 'a', kind: 'openai', address: line.toString().trim() });
  const until = async (state: string): Promise<number> => {
    await vi.waitFor(() => expect(fleet.workers()[0]!.state).toBe(state), patience);
    return clock.nowMs();
  };
  await until('ready');
  let parts = 0;
  let heardMs = 0;
  for (let i = 0; i < 8; i++) {
    const { body } = await fleet.forward(0, '/v1/completions', {}, '{}', never);
    void (async () => {
      for await (const _ of body) {
        parts++;
        heardMs = clock.nowMs();
      }
    })().catch(() => undefined);
  }
  for (let round = 0; round < 2; round++) {
    await vi.waitFor(() => expect(parts).toBeGreaterThan(0), patience);
    await stopProcess(child.pid!);
    const stoppedMs = clock.nowMs();
    const silentMs = await until('silent');
    // What it had written may be read after its stop.
    expect(silentMs - Math.max(stoppedMs, heardMs)).toBeLessThan(1_200);
    const [goesOnMs, waited] = [clock.nowMs(), threadWaits([child.pid!])];
    child.kill('SIGCONT');
    const tookMs = (await until('ready')) - goesOnMs;
    expect(tookMs - waitedBetween(waited, threadWaits([child.pid!]))).toBeLessThan(2_000);
    parts = 0; // the same answers go on
  }
  // A busy machine may keep it waiting for as long as silence takes.
  expect(fleet.counts.lost).toBeGreaterThanOrEqual(2);
  expect(fleet.counts.ready).toBe(fleet.counts.lost + 1);
}, 60_000);
