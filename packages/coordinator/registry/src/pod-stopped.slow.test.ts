/** A pod that is stopped while its answers stream: noticed as soon as one that has nothing to do, with the limits of every coordinator. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { Watch } from '@kvtier/runtime';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, expect, it, vi } from 'vitest';
import { stopProcess } from '../../../../infra/stopped.ts';
import { Fleet } from './fleet.ts';
import { SpokenDiscovery } from './testing/rig.ts';

const patience = { timeout: 20_000, interval: 2 };
const never = new AbortController().signal;
const program = fileURLToPath(new URL('./testing/streaming-pod.ts', import.meta.url));
const fleet = new Fleet({ logger: createLogger('pod-stopped-test', 'silent') });
const children: ChildProcess[] = [];
afterEach(async () => {
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
    const clock = new Watch(10, () => {}); // as the fleet's: what stands still with this process is no silence
    const fromMs = clock.nowMs();
    await vi.waitFor(() => expect(fleet.workers()[0]!.state).toBe(state), patience);
    const tookMs = clock.nowMs() - fromMs;
    clock.stop();
    return tookMs;
  };
  await until('ready');
  let parts = 0;
  for (let i = 0; i < 8; i++) {
    const { body } = await fleet.forward(0, '/v1/completions', {}, '{}', never);
    void (async () => {
      for await (const _ of body) parts++;
    })().catch(() => undefined);
  }
  for (let round = 0; round < 2; round++) {
    await vi.waitFor(() => expect(parts).toBeGreaterThan(0), patience);
    await stopProcess(child.pid!);
    expect(await until('silent')).toBeLessThan(1_200);
    child.kill('SIGCONT');
    expect(await until('ready')).toBeLessThan(2_000);
    parts = 0; // the same answers go on
  }
  expect(fleet.counts).toMatchObject({ lost: 2, ready: 3 });
}, 60_000);
