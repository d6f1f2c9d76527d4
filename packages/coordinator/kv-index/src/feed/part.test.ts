/** A source of the index that has been given back. */
import { expect, it } from 'vitest';
import { KvIndex } from '../kv-index.ts';
import { Part } from './part.ts';

it('a closed part changes nothing of who has its number then', () => {
  const index = new KvIndex({ maxBytes: 1 << 20, countedMedia: 1 });
  const keys = Int32Array.of(1, 0, 2, 0);
  const part = new Part(index, 10);
  part.close();
  const next = new Part(index, 10);
  expect(next.source).toBe(part.source);
  const held = (): number => index.match(keys, [{ sources: [next.source] }])[0]!.blocks;
  expect([part.stored(0, keys, 'root'), held()]).toEqual([true, 0]);
  next.stored(0, keys, 'root');
  part.removed(0, keys);
  part.cleared();
  part.close();
  expect([held(), index.freeSources]).toEqual([2, new KvIndex({ maxBytes: 1 << 20, countedMedia: 1 }).freeSources - 1]);
});
