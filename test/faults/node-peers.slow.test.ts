/**
 * Whole nodes that are peers, under load, while one is killed in mid-transfer, or the way between their namespaces gets narrow,
 * loses packets and then everything: no request fails, no wrong block is served, and blocks come from the peer again without a restart.
 */
import { execFileSync } from 'node:child_process';
import { writeFileSync } from 'node:fs';
import path from 'node:path';
import { packed } from '@kvtier/session/testing';
import { afterEach, expect, it, vi } from 'vitest';
import { freePort } from '../../infra/ports.ts';
import { CpuWaits } from '../e2e/cpu-waits.ts';
import { NodeLoad, Pair, tierOf } from './node-load.ts';
import { NodeRig } from './node-rig.ts';

/** More than one arena holds, less than both and their disks. */
const chains = 12;
const arena = { bytes: 8 << 20 };
let pair: Pair | undefined;
let cleanUp: (() => void) | undefined;
afterEach(async () => {
  await pair?.dispose();
  cleanUp?.();
  pair = undefined;
  cleanUp = undefined;
});

interface Place {
  readonly host: string;
  readonly port: number;
}

function configOf(rig: NodeRig, own: Place, other: Place): object {
  const secretFile = path.join(rig.folder, 'secret');
  writeFileSync(secretFile, 'x'.repeat(48), { mode: 0o600 });
  const security = { encryption: 'none', secretFile, trustedNetwork: true };
  return { arena, peers: { listen: own, peers: [other], security, readLimitMs: 1_000 } };
}

it('one is killed while the other reads from it, and is back', async () => {
  const nodes = new Pair(new NodeRig({ diskBytes: null }), new NodeRig({ diskBytes: 64 << 20 }));
  pair = nodes;
  const places = [await freePort(), await freePort()].map((port) => ({ host: '127.0.0.1', port }));
  const configA = configOf(nodes.a, places[0]!, places[1]!);
  const configB = configOf(nodes.b, places[1]!, places[0]!);
  await Promise.all([nodes.a.start({ config: configA }), nodes.b.start({ config: configB })]);
  const [ask, ...readers] = [await nodes.a.attach(), await nodes.a.attach(), await nodes.a.attach()];
  const writer = await nodes.b.attach();
  const load = new NodeLoad(readers, chains);
  const writing = new NodeLoad([writer], chains);
  await load.servedFrom('peer');
  await writing.stop();
  await writer.end();
  await nodes.b.stop('SIGKILL'); // in mid-transfer: the load never pauses
  await load.until(async () => (await tierOf(ask!, 'peer')).blocks === 0n, 'the loss');
  await load.more(15);
  await nodes.b.start({ config: configB });
  await load.servedFrom('peer'); // out of its disk
  await load.stop();
  expect((await tierOf(ask!, 'peer')).corrupt).toBe(0n);
  for (const engine of [ask!, ...readers]) await engine.end();
});

it('a load that waits at one is told of what is committed at the other, and ends by its window when that is killed', async () => {
  const nodes = new Pair(new NodeRig({ diskBytes: null }), new NodeRig({ diskBytes: null }));
  pair = nodes;
  const places = [await freePort(), await freePort()].map((port) => ({ host: '127.0.0.1', port }));
  await Promise.all([
    nodes.a.start({ config: configOf(nodes.a, places[0]!, places[1]!) }),
    nodes.b.start({ config: configOf(nodes.b, places[1]!, places[0]!) }),
  ]);
  const [prefill, decode] = [await nodes.a.attach(), await nodes.b.attach()];
  await prefill.put('known', 1);
  await vi.waitUntil(async () => (await tierOf(decode, 'peer')).blocks === 1n, { timeout: 20_000 });
  const [count, awaitMs] = [20, 3_000];
  const request = { hashes: packed('chain', count), deadlineMs: 30_000, awaitMs };
  const load = decode.client.send({ $case: 'load', value: request });
  await vi.waitUntil(async () => (await decode.stats()).counters['await.blocks'] === BigInt(count), {
    timeout: 20_000,
  });
  const tookMs: number[] = [];
  for (let first = 0; first < count / 2; first++) {
    const startMs = performance.now();
    await prefill.put('chain', 1, first);
    expect(await decode.client.answer(load, 'ready')).toMatchObject({ first, tier: 'peer' });
    tookMs.push(performance.now() - startMs);
  }
  // Milliseconds, whatever else the machine does: nothing here waits for a timer.
  expect(Math.min(...tookMs)).toBeLessThan(50);
  await nodes.a.stop('SIGKILL');
  const [killedMs, waits] = [performance.now(), new CpuWaits(() => [[nodes.b.child!.pid]])];
  expect(await decode.client.answer(load, 'loadDone')).toEqual({ loaded: count / 2, reason: 'awaited' });
  expect(performance.now() - killedMs).toBeLessThan(awaitMs + 1_000 + waits.ms);
  expect((await decode.stats()).counters['await.blocks']).toBe(0n);
  await decode.client.call({ $case: 'release', value: { loadId: load, corrupt: [] } }, 'done');
  // A load whose engine is killed, or goes, leaves nothing either.
  decode.client.send({ $case: 'load', value: { ...request, hashes: packed('other', count) } });
  const ask = await nodes.b.attach();
  await vi.waitUntil(async () => (await ask.stats()).counters['await.blocks'] === BigInt(count), { timeout: 20_000 });
  await decode.end();
  await vi.waitUntil(async () => (await ask.stats()).counters['await.blocks'] === 0n, { timeout: 20_000 });
  for (const engine of [prefill, ask]) await engine.end();
});

const spaces = [`kvt-a${process.pid}`, `kvt-b${process.pid}`];
const run = (...command: readonly string[]): void => {
  execFileSync(command[0]!, command.slice(1), { stdio: ['ignore', 'ignore', 'pipe'] });
};
const addressOf = (index: number): string => `10.78.0.${1 + index}`;

/** Two network namespaces on one wire; undefined, with a reason on the console, where that is not permitted. */
function wire(): { lose(rule: string | null): void; narrow(rate: string | null): void; remove(): void } | undefined {
  const remove = (): void => {
    for (const space of spaces) {
      try {
        run('ip', 'netns', 'del', space);
      } catch {
        // was not made
      }
    }
  };
  try {
    for (const space of spaces) run('ip', 'netns', 'add', space);
    run('ip', 'link', 'add', 'w0', 'netns', spaces[0]!, 'type', 'veth', 'peer', 'name', 'w1', 'netns', spaces[1]!);
    for (const [index, space] of spaces.entries()) {
      run('ip', '-n', space, 'addr', 'add', `${addressOf(index)}/24`, 'dev', `w${index}`);
      for (const device of [`w${index}`, 'lo']) run('ip', '-n', space, 'link', 'set', device, 'up');
      const nft = `table inet loss { chain in { type filter hook input priority 0; iif "w${index}" meta mark 1 drop; }; }`;
      run('ip', 'netns', 'exec', space, 'nft', nft);
    }
  } catch (error) {
    remove();
    console.warn(`SKIPPED: packets lost between namespaces: ${(error as Error).message.trim()}; run as root with nft`);
    return undefined;
  }
  return {
    lose(rule) {
      for (const [index, space] of spaces.entries()) {
        const lossy = rule === null ? '' : `add rule inet loss in iif w${index} ${rule} drop`;
        run('ip', 'netns', 'exec', space, 'nft', `flush chain inet loss in; ${lossy}`);
      }
    },
    /** All that goes through in a second, each way; what is too much waits for at most 50 ms and is lost then. */
    narrow(rate) {
      for (const [index, space] of spaces.entries()) {
        const shape = ['tbf', 'rate', rate ?? '', 'burst', '64kb', 'latency', '50ms'];
        const device = ['dev', `w${index}`, 'root'];
        if (rate === null) run('ip', 'netns', 'exec', space, 'tc', 'qdisc', 'del', ...device);
        else run('ip', 'netns', 'exec', space, 'tc', 'qdisc', 'replace', ...device, ...shape);
      }
    },
    remove,
  };
}

it('the way between their namespaces is narrow and loses packets, and is cut', async (context) => {
  const network = wire();
  if (network === undefined) return context.skip();
  cleanUp = network.remove;
  const nodes = new Pair(new NodeRig({ diskBytes: null }), new NodeRig({ diskBytes: null }));
  pair = nodes;
  const places = [0, 1].map((index) => ({ host: addressOf(index), port: 7400 }));
  await Promise.all(
    [nodes.a, nodes.b].map((rig, index) =>
      rig.start({
        config: configOf(rig, places[index]!, places[1 - index]!),
        prefix: ['ip', 'netns', 'exec', spaces[index]!],
      }),
    ),
  );
  const load = new NodeLoad(await nodes.engines(), 2 * chains);
  await load.servedFrom('peer');
  network.lose('numgen random mod 100 < 5'); // one packet of 20
  await load.more(15);
  network.narrow('40mbit'); // a block takes its 20 ms, and what is sent meanwhile is lost, too
  await load.servedFrom('peer');
  await load.more(15);
  network.narrow('500kbit'); // a block takes longer than a read may
  await load.more(15);
  network.narrow(null);
  network.lose(''); // the cable is cut
  await load.until(async () => (await tierOf(nodes.askA!, 'peer')).blocks === 0n, 'the partition');
  await load.more(15);
  network.lose(null);
  await load.servedFrom('peer');
  await load.stop();
  for (const engine of [nodes.askA!, nodes.askB!]) expect((await tierOf(engine, 'peer')).corrupt).toBe(0n);
});
