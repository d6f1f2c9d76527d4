/** Many stores at once: all of them come to their turn, whatever becomes of the node meanwhile. */
import fc from 'fast-check';
import { afterEach, expect, it } from 'vitest';
import { StoreTurns } from './store-turns.ts';
import { chainOf } from './testing/memory.ts';
import { ConnectorRig, fastTimers, until } from './testing/rig.ts';

const many = 128;
let rig: ConnectorRig | undefined;
afterEach(async () => {
  await rig?.close();
  rig = undefined;
});

/** One block of each of `many` chains, as a step of as many sequences fills them; `settled`: what became of each. */
function storeMany(connector: ConnectorRig): { readonly released: Promise<unknown>; readonly settled: number[][] } {
  const settled: number[][] = Array.from({ length: many }, () => []);
  const stores = settled.map((own, chain) =>
    connector.store(1_000 + chain, 0, [1 + chain], { onSettled: (held) => own.push(held) }),
  );
  return { released: Promise.all(stores), settled };
}

it('of a step with many sequences are all stored', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  const { released, settled } = storeMany(rig);
  expect(rig.connector.storingBlocks).toBe(many);
  await released;
  await until(() => rig!.connector.storingBlocks === 0, 'the commits');
  expect(rig.connector.counters).toMatchObject({ stores: many, storedBlocks: many, reasons: {} });
  expect(settled).toEqual(Array.from({ length: many }, () => [1]));
  expect([rig.node.held.size, rig.node.wrongs]).toEqual([many, []]);
});

it('of one chain stay in its order', async () => {
  rig = new ConnectorRig();
  await rig.attach();
  await Promise.all(Array.from({ length: many }, (_, i) => rig!.store(1, i, [1 + i])));
  await until(() => rig!.connector.storingBlocks === 0, 'the commits');
  expect(await rig.matched('r', chainOf(1, many), 0)).toBe(many);
});

it.each(['hang up', 'kill', 'stop', 'close'] as const)(
  'are each let go and answered once when the session ends under them: %s',
  async (how) => {
    const own = new ConnectorRig({ timers: fastTimers(20) });
    rig = own;
    await own.attach();
    let go = (): void => {};
    const gate = new Promise<void>((resolve) => {
      go = resolve;
    });
    own.executor.beforeCopy = () => gate;
    const { released, settled } = storeMany(own);
    await until(() => own.executor.copiesInFlight > 0, 'a copy');
    if (how === 'hang up') own.node.hangUp();
    else if (how === 'kill') await own.node.kill();
    else if (how === 'stop') own.node.stopped = true;
    const closing = how === 'close' ? own.connector.close() : undefined;
    if (how === 'hang up' || how === 'kill') await until(() => !own.connector.attached, 'the end of the session');
    go();
    await released;
    await closing;
    await until(() => own.connector.storingBlocks === 0, 'all to be settled');
    expect(settled.map(({ length }) => length)).toEqual(new Array(many).fill(1));
    const held = settled.flat().reduce((sum, one) => sum + one, 0);
    expect(held).toBe(own.connector.counters.storedBlocks);
    const { reasons } = own.connector.counters;
    expect(held + Object.values(reasons).reduce((sum, blocks) => sum + blocks, 0)).toBe(many);
    own.node.go();
  },
);

it('begin once, in their order, so many at a time, and the end is told', async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(fc.nat({ max: 1_000 }), { maxLength: 300 }), async (moves) => {
      const turns = new StoreTurns();
      const begun: number[] = [];
      const running: (() => void)[] = [];
      let added = 0;
      let ended = 0;
      const add = (): void => {
        const own = added++;
        turns.add(() => {
          begun.push(own);
          return new Promise((resolve) => running.push(resolve));
        });
      };
      const end = async (which: number): Promise<void> => {
        running.splice(which % running.length, 1)[0]!();
        ended++;
        await new Promise((resolve) => setImmediate(resolve));
      };
      for (const move of moves) {
        if (move % 4 > 0 || running.length === 0) add();
        else await end(move);
        expect(begun.length).toBe(Math.min(added, ended + 64));
      }
      let isDone = false;
      const done = turns.done().then(() => {
        isDone = true;
      });
      while (running.length > 0) {
        expect(isDone).toBe(false);
        await end(0);
      }
      await done;
      expect(begun).toEqual(Array.from({ length: added }, (_, i) => i));
    }),
    { numRuns: 30 },
  );
});
