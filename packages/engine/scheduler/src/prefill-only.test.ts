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

it('ends a second after it began to offer again, where the node answers each offer late', async () => {
  const rig = new SchedulerRig();
  const offers: number[] = [];
  rig.connector.store = (_hashes, first, _blocks, onReleased, { onSettled } = {}) => {
    offers.push(first);
    queueMicrotask(onReleased);
    rig.world.clock.after(1_000, () => onSettled?.(0, true, true));
  };
  rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
  await rig.world.until(() => rig.ended('a'));
  expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 0 } });
  expect(offers).toEqual([0, 4, 8, 0]);
  expect(Math.floor(rig.world.clock.nowUs() / 1e6)).toBe(2);
  await rig.drain();
  idle(rig);
});

/** Whose offers are answered after so many milliseconds, the last time for all that follow: busy, or held from some offer on. */
function answeringAfter(rig: SchedulerRig, delaysMs: readonly number[], heldFrom = Number.POSITIVE_INFINITY) {
  const offersMs: number[] = [];
  rig.connector.store = (_hashes, _first, { length }, onReleased, { onSettled } = {}) => {
    const isHeld = offersMs.push(rig.world.clock.nowUs() / 1_000) > heldFrom;
    queueMicrotask(onReleased);
    const delayMs = delaysMs[Math.min(offersMs.length, delaysMs.length) - 1]!;
    rig.world.clock.after(delayMs, () => onSettled?.(isHeld ? length : 0, !isHeld));
  };
  return offersMs;
}

it('offers nothing again later than a second after the first time, also behind a pause', async () => {
  const rig = new SchedulerRig();
  const offersMs = answeringAfter(rig, [0, 0, 0, 0, 0, 0, 0, 838, 0]);
  rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
  await rig.world.until(() => rig.ended('a'));
  expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 0 } });
  expect(offersMs.length).toBe(8); // the pause before the next one would end too late
  expect(offersMs.at(-1)! - offersMs[3]!).toBeLessThan(200);
  await rig.drain();
  idle(rig);
});

it('offers what is busy again for a second to a node that has started anew, too', async () => {
  const rig = new SchedulerRig();
  const offersMs = answeringAfter(rig, [0, 0, 0, 1_000, 0], 5);
  rig.submit('a', prompt(1, 48), { prefillOnly: { blocks: 12 } });
  await rig.world.until(() => offersMs.length === 4);
  rig.connector.epoch = 2n;
  await rig.world.until(() => rig.ended('a'));
  expect(rig.last('a')).toMatchObject({ finishReason: 'prefilled', handOff: { readyBlocks: 12 } });
  expect(offersMs.length).toBe(6);
  await rig.drain();
  idle(rig);
});
