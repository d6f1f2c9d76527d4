/** Where prompts are at home by a hash: at workers of the same names in every coordinator, whatever numbers these have there. */
import type { Keys } from '@kvtier/kv-index';
import { expect, it } from 'vitest';
import type { Dispatcher } from './dispatcher.ts';
import { nameOf, never, request, rig } from './testing/dispatcher-rig.ts';

const names = ['p0', 'p1', 'p2', 'p3', 'p4', 'p5', 'p6', 'p7'];
const prompts = Array.from({ length: 64 }, (_, i): Keys => Int32Array.of(Math.imul(i + 1, 0x9e3779b1), i));
const bounded = (workers: readonly string[]) => {
  const made = rig({ policy: 'bounded-hash' });
  for (const name of workers) made.workers.add(name);
  return made;
};
/** Each by itself: nobody has anything, so it goes home. */
async function homesOf(dispatcher: Dispatcher): Promise<string[]> {
  const homes: string[] = [];
  for (const keys of prompts) {
    const choice = await dispatcher.choose(request({ keys }), never);
    homes.push(nameOf(choice));
    choice.ended();
  }
  return homes;
}

it('two coordinators that met them in another order choose alike', async () => {
  const homes = await homesOf(bounded(names).dispatcher);
  expect(new Set(homes).size).toBe(8);
  expect(await homesOf(bounded(names.toReversed()).dispatcher)).toEqual(homes);
});

it('who is back under its name has its prompts again, and who has its number does not', async () => {
  const { workers, dispatcher } = bounded(names);
  const homes = await homesOf(dispatcher);
  workers.all[0]!.state = 'silent';
  workers.changed();
  const without = await homesOf(dispatcher);
  expect(without).toEqual(homes.map((home, i) => (home === 'p0' ? without[i] : home)));
  // Its number is another one's now, at one stroke: nobody saw that it was nobody's.
  workers.all[0]!.state = 'ready';
  workers.all[0]!.record = { ...workers.all[0]!.record, name: 'p9' };
  workers.changed();
  expect(await homesOf(dispatcher)).toEqual(await homesOf(bounded([...names.slice(1), 'p9']).dispatcher));
  workers.all[0] = undefined;
  workers.changed();
  expect(await homesOf(dispatcher)).toEqual(without);
  workers.add('p0');
  expect(await homesOf(dispatcher)).toEqual(homes);
});

it('so do workers of a lane that comes later than they', async () => {
  const { workers, dispatcher } = bounded([]);
  for (const name of names) {
    const worker = workers.add(name);
    worker.record = { ...worker.record, role: 'prefill' };
  }
  const decode = workers.add('decode');
  workers.changed();
  expect(new Set(await homesOf(dispatcher))).toEqual(new Set(['decode']));
  workers.all[decode.number] = undefined;
  workers.changed();
  expect(await homesOf(dispatcher)).toEqual(await homesOf(bounded(names.toReversed()).dispatcher));
});
