/** How much of the index one turn goes through. */
import { expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { DiskIndex } from './disk-index.ts';
import { Segment } from './segment.ts';

const space = namespaceNamed('one');

/** Segments of so many blocks each. */
function filled(count: number, blocks: number): { index: DiskIndex; segments: Segment[] } {
  const index = new DiskIndex();
  const segments = Array.from({ length: count }, (_, id) => new Segment(id, `${id}`, 1 << 28, 0, id));
  for (const segment of segments) {
    index.register(segment);
    for (let at = 0; at < blocks; at++) index.add(space, hashNamed(segment.id * blocks + at), segment, 1 + at, 1);
  }
  return { index, segments };
}

it('what is unlisted already costs a further drop nothing', async () => {
  const { index, segments } = filled(4, 500);
  const told: string[] = [];
  index.follow(({ hashes }) => told.push(...hashes));
  told.length = 0;
  index.drop(segments, false);
  await index.dropped();
  expect([told.length, new Set(told).size, index.count]).toEqual([2_000, 2_000, 0]);
  const looks = vi.spyOn(index.table, 'isListed');
  index.drop(segments, false);
  await index.dropped();
  expect(looks).toHaveBeenCalledTimes(0);
  // One that is listed, in front of others that are not.
  index.clear(segments[3]!);
  for (let at = 0; at < 500; at++) index.add(space, hashNamed(`again ${at}`), segments[3]!, 1 + at, 1);
  for (let at = 1; at < 500; at++) index.remove(index.get(space, hashNamed(`again ${at}`)));
  looks.mockClear();
  index.drop(segments, false);
  await index.dropped();
  expect([looks.mock.calls.length, index.count, told.at(-1)]).toEqual([1, 0, hashNamed('again 0')]);
  index.checkIntegrity(segments);
});
