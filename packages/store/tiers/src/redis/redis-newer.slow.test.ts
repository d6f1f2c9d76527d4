/**
 * A newer program beside this one, on the same server: what it wrote and this one cannot read is a miss here, and stays for those who
 * can. A directory of another format takes the tier out of service, not the node.
 */
import { native } from '@kvtier/data-plane';
import { type HashKey, headerBytes } from '@kvtier/identity';
import { beforeEach, describe, expect, it } from 'vitest';
import { type RedisServer, until } from '../../../../../infra/redis/servers.ts';
import { newerHeaders, resealed } from '../kit/testing/newer.ts';
import { hashNamed, namespaceNamed, type TestBench } from '../kit/testing/objects.ts';
import { fieldOf } from './directory.ts';
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
    ['partitions', '2'],
  ] as const)('a ledger with %s %s is a mistake, as ever', async (field, value) => {
    await (await open()).close();
    shared.tiers = [];
    await server.cli('hset', `${base}ledger`, field, value);
    await expect(open()).rejects.toMatchObject({ code: 'CONFIG', retry: false });
  });
});
