/** Following a bucket: by whose clock packs go, and how long it keeps the event loop. */
import { createServer, type Server } from 'node:http';
import { setImmediate as turn } from 'node:timers/promises';
import { LongestTurn, threadUse } from '@kvtier/data-plane/testing';
import { KvError } from '@kvtier/errors';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { hashNamed, namespaceNamed, silentLog } from '../kit/testing/objects.ts';
import { Discovery } from './discovery.ts';
import { planS3 } from './options.ts';
import { encodePackTable } from './pack-format.ts';
import { PackIndex } from './pack-index.ts';
import { type ListedPage, S3Api } from './s3-api.ts';

const dayMs = 86_400_000;
const objects = [{ namespace: namespaceNamed('one'), hash: hashNamed('a'), bytes: headerBytes + 100 }];
const table = encodePackTable('00'.repeat(16), objects);
const pack = Buffer.concat([table, Buffer.alloc(objects[0]!.bytes)]);
const etagOf = (slot: number): string => `e${slot}`;

describe('packs older than their time to live', () => {
  /** A bucket of one pack a day, the last of today, by the server's clock. */
  const packCount = 6;
  let server: Server;
  let saysTheTime: boolean;
  let deleted: string[];
  let api: S3Api;
  let serverMs: number;
  beforeEach(async () => {
    saysTheTime = true;
    deleted = [];
    serverMs = Date.now();
    server = createServer((request, response) => {
      response.sendDate = false;
      if (saysTheTime) response.setHeader('date', new Date(serverMs).toUTCString());
      const url = new URL(request.url!, 'http://x');
      if (request.method === 'DELETE') deleted.push(url.pathname.slice(-8));
      if (request.method === 'DELETE') response.writeHead(204).end();
      else if (url.searchParams.has('list-type')) {
        const contents = Array.from({ length: packCount }, (_, slot) => {
          const modified = new Date(serverMs - (slot + 0.5) * dayMs).toISOString();
          return `<Contents><Key>kvtier/v1/packs/0000000${slot}</Key><LastModified>${modified}</LastModified><ETag>"${etagOf(slot)}"</ETag><Size>${pack.length}</Size></Contents>`;
        });
        response.setHeader('content-type', 'application/xml');
        response.end(
          `<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>${contents.join('')}</ListBucketResult>`,
        );
      } else {
        const [, first, last] = /bytes=(\d+)-(\d+)/.exec(request.headers.range ?? '')!;
        const body = pack.subarray(Number(first), Number(last) + 1);
        response.writeHead(206, { 'content-length': body.length }).end(body);
      }
    });
    await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  });
  afterEach(async () => {
    vi.restoreAllMocks();
    api.close();
    server.closeAllConnections();
    await new Promise((resolve) => server.close(resolve));
  });
  async function discover(ttlDays: number): Promise<{ discovery: Discovery; index: PackIndex }> {
    const { port } = server.address() as { port: number };
    const plan = planS3({
      ...{
        bucket: 'b',
        endpoint: `http://127.0.0.1:${port}`,
        bytes: 1 << 20,
        packBytes: 64 << 10,
        ttlSeconds: ttlDays * 86_400,
      },
      ...{ accessKeyId: 'a', secretAccessKey: 'b' },
    });
    api = await S3Api.open({ plan, onTry: () => {}, suspended: () => undefined });
    const index = new PackIndex();
    return { discovery: new Discovery({ plan, api, index, log: silentLog, onEvicted: () => {} }), index };
  }

  it.each([
    ['right', 0],
    ['40 days behind', -40],
    ['40 days ahead', 40],
  ])('go by the clock of the listing’s server, when ours is %s', async (_, days) => {
    const real = Date.now.bind(Date);
    vi.spyOn(Date, 'now').mockImplementation(() => real() + days * dayMs);
    const { discovery, index } = await discover(3);
    await discovery.refresh();
    expect(deleted.sort()).toEqual(['00000003', '00000004', '00000005']);
    expect([...index.packs.keys()].sort()).toEqual([0, 1, 2]);
  });

  it('stay when our clock is set right between two listings', async () => {
    const real = Date.now.bind(Date);
    const behind = vi.spyOn(Date, 'now').mockImplementation(() => real() - 40 * dayMs);
    const { discovery, index } = await discover(30);
    await discovery.refresh();
    expect([deleted, index.packs.size]).toEqual([[], packCount]);
    behind.mockRestore();
    await discovery.refresh();
    expect([deleted, index.packs.size]).toEqual([[], packCount]);
  });

  it('stay where the server does not say what time it is', async () => {
    saysTheTime = false;
    const { discovery, index } = await discover(3);
    await discovery.refresh();
    expect([deleted, index.packs.size]).toEqual([[], packCount]);
  });

  it('the one that was not touched for longest is the coldest, by its age, whatever our clock says', async () => {
    const { discovery, index } = await discover(30);
    await discovery.refresh();
    expect(index.coldest(() => true)!.slot).toBe(5);
    vi.spyOn(Date, 'now').mockReturnValue(0); // set back by half a century
    index.touch(index.packs.get(5)!);
    expect(index.coldest(() => true)!.slot).toBe(4);
  });
});

it('a bucket of 100,000 packs among a million slots is followed in turns of a few milliseconds', async () => {
  const packCount = 100_000;
  const plan = planS3({ bucket: 'b', bytes: 1_000_000 * 4096 + 4096, packBytes: 4096 });
  const pagesOf = (without: number, other: number) =>
    async function* (): AsyncGenerator<ListedPage> {
      for (let first = 0; first < packCount; first += 1000) {
        await turn();
        const objects = Array.from({ length: 1000 }, (_, i) => {
          const slot = first + i;
          const etag = slot === other ? 'another' : etagOf(slot);
          return { key: `v1/packs/${String(slot).padStart(8, '0')}`, etag, bytes: 4096, modifiedMs: 1_000_000 };
        });
        yield { objects: objects.filter((_, i) => first + i !== without), serverMs: 1_000_000 };
      }
    };
  const api = { pages: pagesOf(17, 18), get: async () => false } as unknown as S3Api;
  const index = new PackIndex();
  const discovery = new Discovery({ plan, api, index, log: silentLog, onEvicted: () => {} });
  for (let slot = 0; slot < packCount; slot++) {
    discovery.free.delete(slot);
    index.add({ slot, etag: etagOf(slot), bytes: 4096, lastUseMs: 0 }, []);
  }
  const { longestMs, allMs } = await turnsOf(() => discovery.refresh());
  expect(index.packs.size).toBe(packCount - 2);
  expect([17, 18, 19, packCount].map((slot) => discovery.free.has(slot))).toEqual([true, false, false, true]);
  expect(discovery.free.size).toBe(plan.packCount - packCount + 1);
  expect(longestMs).toBeLessThan(Math.max(50, allMs / 8)); // a twentieth; with no turns for what is compared a quarter and more
});

it.each([
  ['may be read later', true, [1, 2, 4, 8, 16, 26, 36]],
  ['will not be before somebody mends it', false, [1, 11, 21, 31]],
])('a pack that %s is looked at again in good time', async (_, retry, expected) => {
  const plan = planS3({ bucket: 'b', bytes: 1 << 20, packBytes: 4096 });
  const objects = [{ key: 'v1/packs/00000003', etag: 'e', bytes: 4096, modifiedMs: 1_000_000 }];
  async function* pages(): AsyncGenerator<ListedPage> {
    yield { objects, serverMs: 1_000_000 };
  }
  let pass = 0;
  const asked: number[] = [];
  const get = async (): Promise<boolean> => {
    asked.push(pass);
    throw new KvError('IO', 'a stall', { retry });
  };
  const api = { pages, get } as unknown as S3Api;
  const discovery = new Discovery({ plan, api, index: new PackIndex(), log: silentLog, onEvicted: () => {} });
  while (++pass < 40) await discovery.refresh();
  expect(asked).toEqual(expected);
});

it.each([
  ['may be deleted later', true, [1, 2, 4, 8, 16, 26, 36]],
  ['may not be deleted', false, [1, 11, 21, 31]],
])(
  'packs that are to go, and %s, are asked for again in good time, and a line a pass says so',
  async (_, retry, expected) => {
    const bytes = pack.length;
    const plan = planS3({ bucket: 'b', bytes: 16 * 4096 + 4096, packBytes: 4096, ttlSeconds: 1_000 });
    const damaged = Buffer.from(pack);
    damaged[table.length - 1]! ^= 1;
    // Damaged, expired, beyond the budget, known before it expires, and one that stays.
    const objects = [3, 4, 99, 5, 6].map((slot) => {
      const modifiedMs = { 4: 0, 5: 1_000_500, 6: 9e9 }[slot] ?? 1_001_000;
      return { key: `v1/packs/${String(slot).padStart(8, '0')}`, etag: etagOf(slot), bytes, modifiedMs };
    });
    let pass = 0;
    let isAllowed = false;
    async function* pages(): AsyncGenerator<ListedPage> {
      yield { objects, serverMs: pass === 1 ? 2_000_000 : 2_000_800 };
    }
    const get = async (key: string, _etag: string, first: number, targets: readonly Buffer[]): Promise<boolean> => {
      (key.endsWith('3') ? damaged : pack).copy(targets[0]!, 0, first);
      return true;
    };
    const asked = new Map<number, number[]>();
    const remove = async (key: string): Promise<void> => {
      const slot = Number(key.slice(-8));
      asked.set(slot, [...(asked.get(slot) ?? []), pass]);
      if (!isAllowed) throw new KvError('IO', 'HTTP 403', { retry });
      objects.splice(
        objects.findIndex((object) => object.key === key),
        1,
      );
    };
    const lines: object[] = [];
    const warn = (fields: object, message: string): void => void lines.push({ pass, ...fields, message });
    const api = { pages, get, delete: remove } as unknown as S3Api;
    const index = new PackIndex();
    const discovery = new Discovery({ plan, api, index, log: { ...silentLog, warn }, onEvicted: () => {} });
    while (++pass < 40) await discovery.refresh();
    const later = expected.map((each) => each + 1).filter((each) => each < 40);
    expect([...asked].sort(([a], [b]) => a - b)).toEqual([
      [3, expected],
      [4, expected],
      [5, later],
      [99, expected],
    ]);
    const message = 's3: packs that cannot be deleted are left alone for a while';
    const packsAt = (at: number): number => (expected.includes(at) ? 3 : 0) + (later.includes(at) ? 1 : 0);
    const passes = [...new Set([...expected, ...later])].sort((a, b) => a - b);
    expect(lines).toEqual(passes.map((at) => ({ pass: at, packs: packsAt(at), reason: 'HTTP 403', message })));
    expect([discovery.unreadableCount, [...index.packs.keys()]]).toEqual([4, [6]]);
    expect([3, 4, 5].map((slot) => discovery.free.has(slot))).toEqual([false, false, false]);
    isAllowed = true;
    for (; pass < 60; pass++) await discovery.refresh();
    expect([3, 4, 5].map((slot) => discovery.free.has(slot))).toEqual([true, true, true]);
    expect([discovery.unreadableCount, [...index.packs.keys()]]).toEqual([0, [6]]);
  },
);

it('what is not ours is looked at once, beyond the budget, too', async () => {
  const plan = planS3({ bucket: 'b', bytes: 16 * 4096 + 4096, packBytes: 4096 });
  const objects = [3, 99].map((slot) => {
    return { key: `v1/packs/${String(slot).padStart(8, '0')}`, etag: 'e', bytes: 4096, modifiedMs: 1_000_000 };
  });
  async function* pages(): AsyncGenerator<ListedPage> {
    yield { objects, serverMs: 1_000_000 };
  }
  const asked: string[] = [];
  const get = async (key: string): Promise<boolean> => {
    asked.push(key.slice(-2));
    return true; // zeros
  };
  const api = { pages, get } as unknown as S3Api;
  const discovery = new Discovery({ plan, api, index: new PackIndex(), log: silentLog, onEvicted: () => {} });
  for (let pass = 0; pass < 5; pass++) await discovery.refresh();
  expect([asked, discovery.foreignCount]).toEqual([['03', '99'], 2]);
  objects.splice(0);
  await discovery.refresh();
  expect(discovery.foreignCount).toBe(0);
});

describe('among packs that are never answered for', () => {
  const goodCount = 20;

  /** Passes until `isDone`; `answers`: the table of this pack can be read, from now on. */
  async function passesUntil(
    badCount: number,
    answers: (slot: number, pass: number) => boolean,
    isDone: (read: ReadonlySet<number>) => boolean,
  ): Promise<number> {
    const plan = planS3({ bucket: 'b', bytes: 64 << 20, packBytes: 4096 });
    const objects = Array.from({ length: badCount + goodCount }, (_, slot) => {
      return {
        key: `v1/packs/${String(slot).padStart(8, '0')}`,
        etag: etagOf(slot),
        bytes: 4096,
        modifiedMs: 1_000_000,
      };
    });
    async function* pages(): AsyncGenerator<ListedPage> {
      yield { objects, serverMs: 1_000_000 };
    }
    let pass = 0;
    const read = new Set<number>();
    const get = async (key: string): Promise<boolean> => {
      const slot = Number(key.slice(-8));
      if (!answers(slot, pass)) throw new KvError('IO', 'a stall', { retry: true });
      read.add(slot);
      return false;
    };
    const api = { pages, get } as unknown as S3Api;
    const discovery = new Discovery({ plan, api, index: new PackIndex(), log: silentLog, onEvicted: () => {} });
    while (!isDone(read) && ++pass < 100) await discovery.refresh();
    return pass;
  }

  it.each([150, 200])('the others have their turn, though these are %i', async (badCount) => {
    const passes = await passesUntil(
      badCount,
      (slot) => slot >= badCount,
      ({ size }) => size === goodCount,
    );
    expect(passes).toBeLessThanOrEqual(Math.ceil(badCount / 16) + 1);
  });

  it('each has its turn again, and is read when it is answered for', async () => {
    const badCount = 400;
    const last = badCount - 1;
    const mendedAt = 60; // each of them is left alone for as long as it can be by then
    const passes = await passesUntil(
      badCount,
      (slot, pass) => slot >= badCount || (slot === last && pass > mendedAt),
      (read) => read.has(last),
    );
    expect(passes).toBeLessThan(mendedAt + badCount / 16 + 2);
  });
});

it('a page of packs that were all replaced goes in turns of a few milliseconds', async () => {
  const packCount = 2_000;
  const plan = planS3({ bucket: 'b', bytes: packCount * 4096 + 4096, packBytes: 4096 });
  const objects = Array.from({ length: packCount }, (_, slot) => {
    return { key: `v1/packs/${String(slot).padStart(8, '0')}`, etag: 'another', bytes: 4096, modifiedMs: 1_000_000 };
  });
  async function* pages(): AsyncGenerator<ListedPage> {
    yield { objects, serverMs: 1_000_000 };
  }
  const get = async (): Promise<boolean> => {
    await turn(); // as any server's answer does
    return false;
  };
  const api = { pages, get } as unknown as S3Api;
  const index = new PackIndex();
  const namespace = namespaceNamed('one');
  for (let slot = 0; slot < packCount; slot++) {
    const records = Array.from({ length: 128 }, (_, at) => {
      return { namespace, hash: `${slot * 128 + at}`.padEnd(32, 'x') as HashKey, offset: 0, bytes: 32 };
    });
    index.add({ slot, etag: etagOf(slot), bytes: 4096, lastUseMs: 0 }, records);
  }
  const discovery = new Discovery({ plan, api, index, log: silentLog, onEvicted: () => {} });
  const { longestMs, allMs } = await turnsOf(() => discovery.refresh());
  expect([index.packs.size, index.count]).toEqual([0, 0]);
  expect(longestMs).toBeLessThan(Math.max(50, allMs / 3)); // a seventh, with the collector's; in one turn two thirds
});

/**
 * The longest of them, and all: a slow machine's are longer by as much as all of its work is.
 * Of this thread's own time: neither of other processes nor of this one's other threads (the collector's, the compiler's).
 */
async function turnsOf(work: () => Promise<void>): Promise<{ readonly longestMs: number; readonly allMs: number }> {
  let isDone = false;
  const longest = new LongestTurn();
  const begun = threadUse();
  const watch = (async () => {
    for (let before = begun; !isDone; ) {
      await turn();
      const now = threadUse();
      longest.add(before, now);
      before = now;
    }
  })();
  await work();
  isDone = true;
  await watch;
  return { longestMs: longest.ms, allMs: threadUse().cpuMs - begun.cpuMs };
}
