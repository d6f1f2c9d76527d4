/**
 * A newer program beside this one, on the same server: what it wrote and this one cannot read is a miss here, and stays for those who
 * can. A directory of another format takes the tier out of service, not the node.
 */
import { native } from '@kvtier/data-plane';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { afterAll, beforeAll, beforeEach, describe, expect, it } from 'vitest';
import { type RedisServer, type ServerGroup, startCluster, until } from '../../../../../infra/redis/servers.ts';
import { newerHeaders, resealed } from '../kit/testing/newer.ts';
import { hashNamed, namespaceNamed, type TestBench } from '../kit/testing/objects.ts';
import { fieldOf } from './directory.ts';
import type { RedisTier } from './redis-tier.ts';
import { sharedServer } from './testing/shared-server.ts';

const payloadBytes = 20_000;
const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const ready = chain.map(() => 'ready');
const base = 'kvtier:{p0}:';

const shared = sharedServer();
const { open } = shared;
let server: RedisServer;
let bench: TestBench;
beforeEach(() => {
  ({ server, bench } = shared);
});
const lua = (program: string): Promise<string> => server.cli('eval', program, '0');
/** Bytes as a text of Lua's. */
const quoted = (bytes: Buffer): string =>
  `'${[...bytes].map((byte) => `\\${String(byte).padStart(3, '0')}`).join('')}'`;

/** The header of a block that is stored, as a newer program may have written it. */
async function renew(hash: HashKey, change: (header: Buffer) => void): Promise<void> {
  const slot = bench.filledSlot(space, hash, payloadBytes);
  const header = resealed(native.arenaRead(bench.arena, slot, headerBytes), change);
  bench.tier.free(slot);
  const found = `redis.call('HGET', '${base}blocks', ${quoted(fieldOf(space, hash))})`;
  const program = `local id = string.match(${found}, '%S+$')
    return redis.call('SETRANGE', '${base}v:' .. id .. ':0', 0, ${quoted(header)})`;
  expect(await lua(program)).toBe('4096');
}

/** All that the server has, but for recency, the numbers of the ledger and what its clock changes. */
const contents = (): Promise<string> =>
  lua(`local all = {}
    for _, key in ipairs(redis.call('KEYS', '${base}v:*')) do all[#all + 1] = key .. redis.sha1hex(redis.call('GET', key)) end
    table.sort(all)
    local entries = redis.call('HGETALL', '${base}blocks')
    for i = 1, #entries, 2 do all[#all + 1] = redis.sha1hex(entries[i]) .. entries[i + 1] end
    return table.concat(all, ' ')`);

describe.each(newerHeaders)('a block with %s', (_, change) => {
  it.each(['native', 'node'] as const)('by way of %s: a miss, counted apart, and it stays', async (transport) => {
    const newer = await open();
    await bench.write(newer, space, chain, payloadBytes);
    const strange = chain[3]!;
    await renew(strange, change);
    const before = await contents();
    const tier = await open({}, { transport });
    expect(tier.lookup(space, chain)).toBe(8);
    const statuses = chain.map((hash) => (hash === strange ? 'missing' : 'ready'));
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(statuses);
    expect(tier.stats()).toMatchObject({ inService: true, corrupt: 0, blocks: 7, detail: { foreign_blocks: 1 } });
    expect(tier.lookup(space, [strange])).toBe(0);
    // The others go on listing it, and a node that comes anew does.
    await tier.close();
    expect(newer.lookup(space, chain)).toBe(8);
    expect((await open()).stats().blocks).toBe(8);
    expect(await contents()).toBe(before);
  });
});

describe("a block that was read as a newer program's", () => {
  const strange = chain[3]!;
  const [, change] = newerHeaders[0]!;
  const field = quoted(fieldOf(space, strange));
  const score = (): Promise<string> => lua(`return redis.call('ZSCORE', '${base}recency', ${field})`);
  let newer: RedisTier;
  let tier: RedisTier;
  beforeEach(async () => {
    newer = await open();
    await bench.write(newer, space, chain, payloadBytes);
    await renew(strange, change);
    tier = await open();
    expect(await bench.read(tier, space, [strange], payloadBytes)).toEqual(['missing']);
  });

  it('is not asked for again, however often an engine makes it, and ages', async () => {
    const [before, all] = [await score(), await contents()];
    for (let i = 0; i < 3; i++) {
      expect(tier.lookup(space, [strange])).toBe(0);
      expect(await bench.read(tier, space, [strange], payloadBytes)).toEqual(['missing']);
      tier.touch(space, [strange]);
      expect(await bench.write(tier, space, [strange], payloadBytes)).toEqual(['refused']);
    }
    expect(tier.lookup(space, [strange])).toBe(0);
    expect(tier.stats()).toMatchObject({ corrupt: 0, blocks: 7, refused: 3, detail: { foreign_blocks: 1, full: 0 } });
    expect([await score(), await contents()]).toEqual([before, all]);
  });

  it('and goes for what is fresher, whoever makes it meanwhile: its name is free then', async () => {
    const fresh = Array.from({ length: 120 }, (_, i) => hashNamed(100 + i)); // more than there is room for
    const statuses: string[] = [];
    const make = async (): Promise<boolean> => {
      const [status] = await bench.write(tier, space, [strange], payloadBytes);
      statuses.push(status!);
      return status !== 'refused';
    };
    for (let i = 0; i < fresh.length; i += 10) {
      await bench.write(newer, space, fresh.slice(i, i + 10), payloadBytes);
      await make();
    }
    await until(make, 'the news that it went');
    expect(statuses.find((status) => status !== 'refused')).toBe('stored');
    expect(await bench.read(tier, space, [strange], payloadBytes)).toEqual(['ready']);
  });

  it('and has another value by now: that is listed', async () => {
    expect(newer.remove(space, [strange], 'asked')).toBe(1);
    expect(await bench.write(newer, space, [strange], payloadBytes)).toEqual(['stored']);
    await until(() => tier.lookup(space, [strange]) === 1, 'the news of it');
    expect(await bench.read(tier, space, [strange], payloadBytes)).toEqual(['ready']);
    expect(await bench.write(tier, space, [strange], payloadBytes)).toEqual(['held']);
  });
});

describe('a directory of another format', () => {
  const line = /has format kvtier-redis-3, of another version of kvtier; .*keyPrefix/;

  it('is no reason for a node not to start: it says so, may be opened later, and touches nothing', async () => {
    const newer = await open();
    await bench.write(newer, space, chain, payloadBytes);
    await newer.close();
    shared.tiers = [];
    await server.cli('hset', `${base}ledger`, 'format', 'kvtier-redis-3');
    const before = await contents();
    await expect(open()).rejects.toMatchObject({ code: 'CONFIG', retry: true, message: expect.stringMatching(line) });
    const tier = await open({}, { openWithoutServer: true });
    expect(tier.stats()).toMatchObject({
      inService: false,
      blocks: 0,
      outOfServiceReason: expect.stringMatching(line),
    });
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'missing'));
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'refused'));
    expect(await contents()).toBe(before);
    await server.cli('hset', `${base}ledger`, 'format', 'kvtier-redis-2');
    await until(() => tier.stats().inService, 'its own format');
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
  });

  it('with keys of other types: the same', async () => {
    await (await open()).close();
    shared.tiers = [];
    await server.cli('hset', `${base}ledger`, 'format', 'kvtier-redis-3');
    await server.cli('set', `${base}blocks`, 'x');
    await expect(open()).rejects.toMatchObject({ code: 'CONFIG', retry: true, message: expect.stringMatching(line) });
    expect(await server.cli('get', `${base}blocks`)).toBe('x');
  });

  it('while a node is in service: out of service, and back', async () => {
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    await server.cli('hset', `${base}ledger`, 'format', 'kvtier-redis-3');
    await until(() => line.test(tier.stats().outOfServiceReason), 'its reason');
    await server.cli('hset', `${base}ledger`, 'format', 'kvtier-redis-2');
    await until(() => tier.stats().inService, 'its own format');
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(ready);
  });

  it.each([
    ['format', 'other'],
    ['format', 'kvtier-redis-1'],
    ['partitions', '2'],
  ] as const)('a ledger with %s %s is a mistake, as ever', async (field, value) => {
    await (await open()).close();
    shared.tiers = [];
    await server.cli('hset', `${base}ledger`, field, value);
    await expect(open()).rejects.toMatchObject({ code: 'CONFIG', retry: false });
  });
});

describe('a Cluster, most of whose ledgers are of another format', () => {
  let group: ServerGroup;
  beforeAll(async () => {
    group = await startCluster(3, 0);
  });
  afterAll(() => group.stop());

  it('is left alone: none of the others is made, nor is what lies there swept', async () => {
    const cluster = { servers: group.urls, mode: 'cluster', partitions: 8 } as const;
    const tier = await open({ ...cluster, bytes: 8 << 20 });
    const many = Array.from({ length: 64 }, (_, i) => hashNamed(i));
    expect(await bench.write(tier, space, many, payloadBytes)).toEqual(many.map(() => 'stored'));
    await tier.close();
    shared.tiers = [];
    const keysOf = async (each: RedisServer): Promise<string[]> => (await each.cli('keys', '*')).split('\n').sort();
    let absent = 0;
    for (const each of group.servers)
      for (const key of await keysOf(each)) {
        const [, name] = /^kvtier:\{p(\d)[.\d]*\}:ledger$/.exec(key) ?? [];
        if (name === undefined) continue;
        if (Number(name) >= 6) absent += Number(await each.cli('del', key));
        else await each.cli('hset', key, 'format', 'kvtier-redis-3');
      }
    expect(absent).toBe(2);
    const before = await Promise.all(group.servers.map(keysOf));
    await expect(open({ ...cluster, bytes: 8 << 20 })).rejects.toMatchObject({ code: 'CONFIG', retry: true });
    expect(await Promise.all(group.servers.map(keysOf))).toEqual(before);
  });
});
