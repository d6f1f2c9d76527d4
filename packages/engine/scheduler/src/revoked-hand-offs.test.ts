/** A hand-off that gave up its room for an older request: what the other worker has stored meanwhile is not computed twice. */
import { expect, it } from 'vitest';
import { idle, pair } from './testing/pair.ts';
import { naiveAnswer, prompt } from './testing/rig.ts';

it('asks the tier when it has room again', async () => {
  const { world, p, d } = pair({}, { blockCount: 17 });
  const match = d.connector.match.bind(d.connector);
  let isStored = false;
  d.connector.match = (id, ...question) =>
    isStored || !id.startsWith('a') ? match(id, ...question) : { state: 'pending' };
  d.submit('old', prompt(3, 20), { maxTokens: 30 });
  await world.until(() => d.engine.stats().running === 1);
  d.submit('a', prompt(1, 40), { handOff: { blocks: 9, stallMs: 60_000, deadlineMs: 60_000 } });
  await world.until(() => d.engine.stats().preemptions === 1);
  await p.generate('a', prompt(1, 40), { prefillOnly: { blocks: 9 } });
  isStored = true;
  d.engine.wake();
  await world.until(() => d.ended('a'));
  expect(d.ended('old')).toBe(true);
  expect(d.engine.stats()).toMatchObject({ handOffEnds: { preempted: 1 }, preemptions: 1, loads: 1, shortLoads: 0 });
  expect(d.outputs.get('a')!.find(({ cache }) => cache)!.cache).toMatchObject({ tokensByTier: { arena: 36 } });
  expect(d.tokens('a')).toEqual(naiveAnswer(prompt(1, 40), 4));
  await d.drain();
  idle(d);
});
