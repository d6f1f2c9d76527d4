import { expect, it } from 'vitest';
import { PageWatch } from './page-watch.ts';

const gib = 2 ** 30;
const minuteMs = 61_000;
const settled = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** What the kernel says of an arena of which so many bytes lie in huge pages. */
const mapsOf = (hugeBytes: number): string =>
  [
    ...['7f00-7f01 rw-s 00000000 00:1a 2   /dev/shm/kvtier-a.lock', 'ShmemPmdMapped:        0 kB'],
    ...['7f01-7f02 rw-s 00000000 00:1a 3   /dev/shm/kvtier-a', 'Size:  4 kB', `ShmemPmdMapped: ${hugeBytes / 1024} kB`],
  ].join('\n');

const watchOf = async (bytes: number, hugeBytes: number, pageBytes = 4096) => {
  const maps = { hugeBytes, looks: 0, isSilent: false };
  const told = async (): Promise<string> => {
    maps.looks++;
    if (maps.isSilent) throw new Error('EACCES');
    return mapsOf(maps.hugeBytes);
  };
  const watch = new PageWatch('/dev/shm/kvtier-a', bytes, pageBytes, told, 0);
  await watch.begun;
  return { maps, watch };
};

it('tells what the kernel said at the start, and a minute later what it says then', async () => {
  const { maps, watch } = await watchOf(gib, gib / 2);
  maps.hugeBytes = gib;
  expect(watch.pages(minuteMs / 2)).toEqual({ pageBytes: 4096, hugeBytes: gib / 2 });
  expect(maps.looks).toBe(1);
  watch.pages(minuteMs);
  await settled();
  expect(watch.pages(minuteMs)).toEqual({ pageBytes: 4096, hugeBytes: gib });
  maps.isSilent = true;
  watch.pages(2 * minuteMs);
  await settled();
  expect(watch.pages(2 * minuteMs).hugeBytes).toBe(gib);
  expect(maps.looks).toBe(3);
});

it.each([
  ['all of a small arena', gib, 0, 3],
  ['a little of a large one', 64 * gib, 62 * gib, 3],
  ['more than 2 GiB', 64 * gib, 61 * gib, 0],
])(
  '%s in small pages: asked once a minute, or never again, since the answer would hold the process up',
  async (_, bytes, huge, looks) => {
    const { maps, watch } = await watchOf(bytes, huge);
    for (let minute = 1; minute <= 3; minute++) expect(watch.pages(minute * minuteMs).hugeBytes).toBe(huge);
    expect(maps.looks).toBe(1 + looks);
  },
);

it('all is huge on hugetlbfs', async () => {
  expect((await watchOf(gib, 0, 2 ** 21)).watch.pages(0)).toEqual({ pageBytes: 2 ** 21, hugeBytes: gib });
});
