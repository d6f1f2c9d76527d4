/** The listener for probes and scrapes of a real cache node: what it says while the node starts, serves, stands still and is dead. */
import { statSync } from 'node:fs';
import { createServer } from 'node:net';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { freePort } from '../../infra/ports.ts';
import { NodeRig } from './node-rig.ts';

const patience = { timeout: 60_000, interval: 20 };
let rig: NodeRig;
let port: number;
beforeEach(async () => {
  rig = new NodeRig();
  port = await freePort();
});
afterEach(() => rig.dispose());

const operations = () => ({ operations: { port } });
/** As a kubelet probes: a status within its time, or nothing. */
const probe = (path: string): Promise<number | undefined> =>
  fetch(`http://127.0.0.1:${port}${path}`, { signal: AbortSignal.timeout(1_000) }).then(
    ({ status }) => status,
    () => undefined,
  );
const metrics = async (): Promise<string> => (await fetch(`http://127.0.0.1:${port}/metrics`)).text();

it('is live while it starts, and ready when it takes sessions', async () => {
  const mute = createServer();
  const mutePort = await freePort();
  await new Promise<void>((resolve) => mute.listen(mutePort, '127.0.0.1', resolve));
  const redis = { servers: [`redis://127.0.0.1:${mutePort}`], bytes: 1 << 20 };
  const started = rig.start({ config: { ...operations(), redis } });
  await vi.waitUntil(async () => (await probe('/health/live')) === 200, patience);
  const ready = await fetch(`http://127.0.0.1:${port}/health/ready`);
  expect([ready.status, await ready.json()]).toMatchObject([503, { why: expect.stringMatching(/^starting: /) }]);
  expect(await metrics()).toContain('\nkvtier_node_events{event="turns.long"} 0\n');
  await started;
  expect(await probe('/health/ready')).toBe(200);
  expect(await metrics()).toContain('\nkvtier_tier_in_service{tier="redis"} 0\n');
  await rig.stop();
  expect(await probe('/health/live')).toBeUndefined();
  mute.close();
});

it('counts what sessions do, as it tells them', async () => {
  await rig.start({ config: operations() });
  const engine = await rig.attach();
  expect(await engine.put('a', 4)).toBe(4);
  expect((await engine.load('a', 4)).loaded).toBe(4);
  const { tiers, counters } = await engine.stats();
  const arena = tiers.find(({ tier }) => tier === 'arena')!;
  const text = await metrics();
  const lines = text.split('\n');
  for (const line of [
    'kvtier_node_events{event="commit.blocks"} 4',
    'kvtier_node_events{event="session.open"} 1',
    'kvtier_node_events{event="arena.pinned_blocks"} 0',
    'kvtier_tier_blocks{tier="arena"} 4',
    `kvtier_tier_bytes{tier="arena"} ${arena.bytes}`,
    `kvtier_tier_capacity_bytes{tier="arena"} ${arena.capacityBytes}`,
    'kvtier_tier_in_service{tier="disk"} 1',
  ])
    expect(lines).toContain(line);
  for (const event of Object.keys(counters)) expect(text).toContain(`kvtier_node_events{event="${event}"} `);
  await engine.end();
  await vi.waitUntil(async () => (await metrics()).includes('kvtier_node_events{event="session.open"} 0'), patience);
  expect(await rig.stop()).toEqual({ code: 0, signal: null });
});

it('a node that stands still fails the probe, and so does one that was killed, whose socket is still there', async () => {
  await rig.start({ config: operations() });
  expect(await probe('/health/live')).toBe(200);
  rig.child!.kill('SIGSTOP');
  expect(await probe('/health/live')).toBeUndefined();
  rig.child!.kill('SIGCONT');
  await vi.waitUntil(async () => (await probe('/health/ready')) === 200, patience);
  rig.child!.kill('SIGKILL');
  await rig.exit;
  expect(statSync(rig.socketPath).isSocket()).toBe(true);
  expect([await probe('/health/live'), await probe('/health/ready')]).toEqual([undefined, undefined]);
});

it('a port that is taken is one line at the start, and leaves nothing', async () => {
  const other = createServer();
  await new Promise<void>((resolve) => other.listen(port, '127.0.0.1', resolve));
  await expect(rig.start({ config: operations() })).rejects.toThrow(
    `cache-node: LOCKED: operations.port: 127.0.0.1:${port}: another process listens there; choose another port`,
  );
  expect(rig.stderr.trim().split('\n').length).toBe(1);
  expect(await rig.exit).toEqual({ code: 1, signal: null });
  other.close();
});
