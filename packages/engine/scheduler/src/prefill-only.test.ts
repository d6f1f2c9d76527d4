/** Prefill for another worker, where the cache node that takes its blocks dies and comes back with nothing. */
import { expect, it } from 'vitest';
import { idle } from './testing/pair.ts';
import { prompt, SchedulerRig } from './testing/rig.ts';

const readyOf = (rig: SchedulerRig): number[] =>
  rig.outputs.get('a')!.flatMap(({ handOff }) => handOff?.readyBlocks ?? []);

/** A tier that answers when it is told to: how many blocks it holds. */
function slowTier(rig: SchedulerRig) {
  const offers: [first: number, count: number][] = [];
  const answers: (() => void)[] = [];
  rig.connector.store = (_hashes, first, blocks, onReleased, { onSettled } = {}) => {
    offers.push([first, blocks.length]);
    queueMicrotask(onReleased);
    answers.push(() => onSettled?.(blocks.length, false));
  };
  const answer = (): void => {
    for (const one of answers.splice(0)) one();
  };
  return { offers, answer };
}

it('offers again what the node held before it started anew, and counts none of it', async () => {
  const rig = new SchedulerRig();
  rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
  await rig.world.until(() => readyOf(rig).at(-1) === 4);
  rig.connector.tier.clear();
  rig.connector.epoch++;
  await rig.world.until(() => rig.ended('a'));
  expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 12 } });
  expect(rig.connector.tier.size).toBe(12);
  await rig.drain();
  idle(rig);
});

it('counts no answer to what was offered before', async () => {
  const rig = new SchedulerRig();
  const { offers, answer } = slowTier(rig);
  rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
  await rig.world.until(() => offers.length === 3 && rig.world.pendingCount === 0);
  rig.connector.epoch++;
  answer();
  await rig.world.until(() => offers.length === 4);
  expect(offers.splice(0)).toEqual([
    [0, 4],
    [4, 4],
    [8, 4],
    [0, 12],
  ]);
  expect([readyOf(rig), rig.ended('a')]).toEqual([[], false]);
  answer();
  await rig.world.until(() => rig.ended('a'));
  expect([readyOf(rig), offers]).toEqual([[12, 12], []]);
  await rig.drain();
  idle(rig);
});

it('says that the node holds nothing where its blocks have been let go', async () => {
  const rig = new SchedulerRig({ blockCount: 17, limits: { exportShare: 1 } });
  const { offers, answer } = slowTier(rig);
  rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
  await rig.world.until(() => offers.length === 3 && rig.world.pendingCount === 0);
  rig.submit('b', prompt(2, 40));
  await rig.world.until(() => rig.ended('b'));
  rig.connector.epoch++;
  answer();
  await rig.world.until(() => rig.ended('a'));
  expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 0 } });
  await rig.drain();
  idle(rig);
});
