/** What is learned of copies while many run, which one engine of copies does one after the other. */
import { afterEach, expect, it } from 'vitest';
import { ManualTimers } from './testing/manual-timers.ts';
import { chainOf } from './testing/memory.ts';
import { ConnectorRig, until } from './testing/rig.ts';

let rig: ConnectorRig;
afterEach(() => rig.close());

const [blocks, copyMs, blockTokens] = [32, 3, 4];
const ids = (first: number): number[] => Array.from({ length: blocks }, (_, i) => first + i);

it('many loads at once wait for each other, and that does not make copies slow: the next hit is loaded', async () => {
  const timers = new ManualTimers();
  rig = new ConnectorRig({ loadDeadlineMs: 60_000, timers });
  rig.node.readyBlocks = blocks;
  await rig.attachByHand(timers);
  await rig.store(1, 0, ids(10));
  await until(() => rig.connector.counters.storedBlocks === blocks, 'the commits');
  const gates: (() => void)[] = [];
  rig.executor.beforeCopy = () => new Promise((resolve) => gates.push(resolve));
  /** All are asked for at once, and copied one after the other. */
  const load = async (names: readonly string[]): Promise<void> => {
    const planned: number[] = [];
    for (const name of names) planned.push(await rig.matched(name, chainOf(1, blocks + 1), 0));
    expect(planned).toEqual(names.map(() => blocks));
    const done = names.map((name) => rig.load(name, 1, 0, ids(100)));
    await until(() => gates.length === names.length, 'the copies');
    for (const open of gates.splice(0)) {
      const copied = rig.executor.copiesInFlight - 1;
      await timers.pass(copyMs);
      open();
      await until(() => rig.executor.copiesInFlight === copied, 'a copy');
    }
    for (const { loaded } of await Promise.all(done)) expect(loaded).toBe(blocks);
    for (const name of names) rig.connector.forget(name);
  };
  for (let at = 0; at < 10; at++) await load([`one ${at}`]);
  const tokens = blocks * blockTokens;
  for (let at = 0; at < 50; at++) rig.connector.observePrefill(tokens, (tokens * (tokens + 1)) / 2, blocks * 1_000);
  await load(Array.from({ length: 64 }, (_, at) => `many ${at}`));
  await load(['next']);
});
