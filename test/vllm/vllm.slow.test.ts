/**
 * The connector inside a real vLLM engine (`npm run test:vllm`): the same prompts with and without it, over native offloading,
 * beside others, over deaths. Equal tokens, nothing failed, and what is whole and shared is loaded.
 */
import { closeSync, fstatSync, mkdtempSync, openSync, readdirSync, rmSync, writeFileSync, writeSync } from 'node:fs';
import { join } from 'node:path';
import { afterAll, afterEach, describe, expect, it } from 'vitest';
import { hosts, hostsMissing } from '../../infra/hosts/hosts.ts';
import { leastSteps, type ModelKind, type Run, vllmMissing } from './engine.ts';
import { distinctTokens, prompts } from './prompts.ts';
import { cachedShare, counted, expectEqual, patient, tell, VllmRig } from './rig.ts';
import { Kept } from './right.ts';

const missing = vllmMissing();
const count = Number(process.env.KVTIER_VLLM_PROMPTS ?? 200);
const kills = Number(process.env.KVTIER_VLLM_KILLS ?? 5);
const minutes = (n: number): number => n * 60_000;
const all = prompts(count, 12);

/** Of a node's configuration: the one other host. */
function peersOf(folder: string, own: string, other: string): object {
  const secretFile = join(folder, 'secret');
  writeFileSync(secretFile, 'x'.repeat(48), { mode: 0o600 });
  const port = 7_411;
  const security = { encryption: 'none', secretFile, trustedNetwork: true };
  return { listen: { host: own, port }, peers: [{ host: other, port }], security };
}

if (missing !== null) console.warn(`SKIPPED: the connector inside a real vLLM engine (${missing})`);

describe.skipIf(missing !== null)('the connector inside a real vLLM engine', () => {
  let rig: VllmRig;
  afterEach(() => rig.close());

  const kept = new Kept();
  afterAll(() => kept.close());
  const right = (kind: ModelKind): Promise<Run> => kept.right(rig, kind, all);

  for (const kind of ['llama', 'mistral-sw', 'gemma3'] as const) {
    it(`${kind}: vLLM's native offloading over the node loads what it and the connector stored`, {
      timeout: minutes(30),
    }, async () => {
      rig = new VllmRig();
      const expected = await right(kind);
      await rig.node.start();
      const first = await rig.engine({ model: kind, transfer: rig.offloading(patient) });
      expectEqual(await first.generate(all), expected);
      await first.settle();
      await first.kill();

      const second = await rig.engine({ model: kind, transfer: rig.offloading(patient) });
      const again = await second.generate(all);
      expectEqual(again, expected);
      tell(
        `${kind}, native offloading, engine restarted: ${(100 * cachedShare(again, all)).toFixed(1)} % of whole blocks cached, ${again.external_hits} tokens by the node, ${distinctTokens(all)} distinct (${counted(again)})`,
      );
      expect(cachedShare(again, all)).toBeGreaterThanOrEqual(0.95);
      await second.kill();

      const connector = await rig.engine({ model: kind, extra: patient });
      const shared = await connector.generate(all);
      expectEqual(shared, expected);
      tell(`${kind}, the connector after native offloading: ${(100 * cachedShare(shared, all)).toFixed(1)} % cached`);
      expect(cachedShare(shared, all)).toBeGreaterThanOrEqual(0.95);
    });
  }

  it('two engines on one node: what one computed the other loads', { timeout: minutes(15) }, async () => {
    rig = new VllmRig();
    const expected = await right('llama');
    await rig.node.start();
    const one = await rig.engine({ model: 'llama', extra: patient });
    const other = await rig.engine({ model: 'llama', extra: patient });
    expectEqual(await one.generate(all), expected);
    await one.settle();
    const run = await other.generate(all);
    expectEqual(run, expected);
    expect(run.external_hits).toBeGreaterThanOrEqual(0.95 * distinctTokens(all));
  });

  it.skipIf(hostsMissing() !== undefined)(
    'two hosts: what one computed the other loads',
    {
      timeout: minutes(15),
    },
    async () => {
      rig = new VllmRig(); // whose engine says what is right
      const cluster = await hosts(['a', 'b']);
      const rigs: VllmRig[] = [];
      try {
        const expected = await right('llama');
        for (const [own, other] of [
          ['a', 'b'],
          ['b', 'a'],
        ] as const) {
          const each = new VllmRig({}, cluster.prefix(own));
          rigs.push(each);
          each.node.configure({ peers: peersOf(rigs[0]!.folder, cluster.address(own), cluster.address(other)) });
        }
        await Promise.all(rigs.map((each) => each.node.start()));
        const [one, two] = rigs as [VllmRig, VllmRig];
        const writer = await one.engine({ model: 'llama', extra: patient });
        expectEqual(await writer.generate(all), expected);
        await writer.settle();
        await writer.stop();
        const reader = await two.engine({ model: 'llama', extra: patient });
        // The other host's news takes its way.
        await reader.settle();
        const run = await reader.generate(all);
        expectEqual(run, expected);
        tell(
          `two hosts: ${run.external_hits} tokens by the connector, ${distinctTokens(all)} distinct (${counted(run)})`,
        );
        expect(run.external_hits).toBeGreaterThanOrEqual(0.95 * distinctTokens(all));
      } finally {
        for (const each of rigs) await each.close();
        await cluster.close();
      }
    },
  );

  for (const [what, signal] of [
    ['killed', 9],
    ['stopped', 19],
  ] as const) {
    it(`the node ${what} in mid-run: nothing fails, nothing differs, and it comes back`, {
      timeout: minutes(15),
    }, async () => {
      rig = new VllmRig();
      const expected = await right('llama');
      await rig.node.start();
      const engine = await rig.engine({ model: 'llama' });
      expectEqual(await engine.generate(all), expected);
      await engine.settle();
      await engine.reset(); // so that this run loads, and the blow comes in the midst of it
      const blow = { after_finished: Math.floor(count / 4), signal, pid: rig.node.pid! };
      expectEqual(await engine.generate(all, { events: [blow] }), expected);

      if (signal === 9) await rig.node.signal('SIGKILL').then(() => rig.node.start());
      else await rig.node.signal('SIGCONT');
      // It comes back by itself: within a minute a run is served by the tier again.
      const end = Date.now() + 60_000;
      for (let hits = 0; hits === 0; ) {
        expect(Date.now(), 'the connector did not come back').toBeLessThan(end);
        await engine.settle(1);
        await engine.reset();
        const run = await engine.generate(all);
        expectEqual(run, expected);
        hits = run.external_hits;
      }
    });
  }

  it('a node without room: nothing fails, nothing differs', { timeout: minutes(15) }, async () => {
    rig = new VllmRig({ arena: { bytes: 4 << 20 }, disk: null });
    const expected = await right('llama');
    await rig.node.start();
    const engine = await rig.engine({ model: 'llama', blocks: 256 });
    for (let round = 0; round < 2; round++) {
      expectEqual(await engine.generate(all), expected);
      await engine.reset();
    }
  });

  it('bytes of the arena flipped in mid-run: nothing differs', { timeout: minutes(15) }, async () => {
    rig = new VllmRig();
    const expected = await right('llama');
    await rig.node.start();
    const engine = await rig.engine({ model: 'llama' });
    expectEqual(await engine.generate(all), expected);
    await engine.settle();
    await engine.reset();
    const arena = openSync(rig.arena(), 'r+');
    try {
      const { size } = fstatSync(arena);
      const running = engine.generate(all);
      let over = false;
      const spoilt = (async () => {
        for (let at = 4096 + 777; !over; at = (at + 48_271) % size) {
          writeSync(arena, Buffer.from([at & 0xff]), 0, 1, at);
          if (at % 16 === 0) await new Promise(setImmediate);
        }
      })();
      const run = await running.finally(() => {
        over = true;
      });
      await spoilt;
      expectEqual(run, expected);
    } finally {
      closeSync(arena);
    }
  });

  it(`${kills} kills of the engine leave nothing in shared memory`, { timeout: minutes(2 * kills + 10) }, async () => {
    const shared = mkdtempSync('/dev/shm/kvtier-vllm-');
    rig = new VllmRig({ arena: { bytes: 192 << 20, dir: shared } });
    try {
      await rig.node.start();
      const empty = readdirSync(shared);
      for (let kill = 0; kill < kills; kill++) {
        const engine = await rig.engine({ model: 'llama' });
        const blow = { after_steps: Math.floor((kill * leastSteps(count)) / kills), signal: 9, pid: engine.pid };
        await expect(engine.generate(all, { events: [blow] })).rejects.toThrow('the engine ended');
        await engine.kill();
        expect(readdirSync(shared)).toEqual(empty); // the node's arena, and the file whose bytes are held
      }
      await rig.node.signal('SIGTERM');
      expect(readdirSync(shared)).toEqual([]);
    } finally {
      await rig.node.signal('SIGKILL');
      rmSync(shared, { recursive: true, force: true });
    }
  });
});
