/** One Redis server, several tiers on it: what they share, what they refuse, and what each policy does. */
import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setTimeout as passed } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { systemClock } from '@kvtier/runtime';
import { beforeEach, describe, expect, it, vi } from 'vitest';
import { aclRules, type RedisServer, until } from '../../../../../infra/redis/servers.ts';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';
import { byLaw } from '../kit/testing/law.ts';
import { hashNamed, namespaceNamed, type TestBench } from '../kit/testing/objects.ts';
import { Directory } from './directory.ts';
import { foreignCalls } from './other-users.ts';
import { chargeOf } from './script-pieces.ts';
import { sharedServer } from './testing/shared-server.ts';

const payloadBytes = 20_000;
const charge = chargeOf(payloadBytes + 256, 4096);
const space = namespaceNamed('one');
const other = namespaceNamed('two');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const base = 'kvtier:{p0}:';
const root = fileURLToPath(new URL('../../../../..', import.meta.url));

const shared = sharedServer();
const { open } = shared;
let server: RedisServer;
let bench: TestBench;
beforeEach(() => {
  ({ server, bench } = shared);
});
/** What lies under the prefix, by the server's own numbers, at one instant: [value bytes, used, cap]. */
async function serverBytes(): Promise<[number, number, number]> {
  const lua = `local sum = 0
    for _, key in ipairs(redis.call('KEYS', '${base}v:*')) do sum = sum + redis.call('STRLEN', key) end
    return sum .. ' ' .. redis.call('HGET', '${base}ledger', 'used') .. ' ' .. redis.call('HGET', '${base}ledger', 'cap')`;
  const [values, used, cap] = (await server.cli('eval', lua, '0')).split(' ').map(Number);
  return [values!, used!, cap!];
}

describe('nodes that share a server', () => {
  it('see what the others store and remove, and read it', async () => {
    const [one, two] = [await open(), await open()];
    const told: string[] = [];
    two.follow((change) => told.push(`${change.kind} ${change.hashes.length}`));
    await bench.write(one, space, chain, payloadBytes);
    await until(() => two.lookup(space, chain) === 8, 'the other node');
    expect(await bench.read(two, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    expect(await bench.write(two, space, chain.slice(0, 1), payloadBytes)).toEqual(['held']);
    two.remove(space, chain.slice(4), 'asked');
    await until(() => one.lookup(space, chain) === 4, 'the first node');
    expect(told).toEqual([...chain.map(() => 'stored 1'), ...chain.slice(4).map(() => 'removed 1')]);
  });

  it('are nobody but nodes to each other: no command of theirs counts as another user’s', async () => {
    const foreign = async (): Promise<number> => foreignCalls(await server.cli('info', 'commandstats'));
    await server.cli('config', 'resetstat');
    const [one, two] = [await open({ bytes: 10 * charge, policies: { default: { ttlSeconds: 60 } } }), await open()];
    for (const tier of [one, two]) {
      await bench.write(tier, space, chain, payloadBytes);
      await bench.write(tier, other, chain, payloadBytes);
      await bench.read(tier, other, chain, payloadBytes);
      tier.remove(other, chain.slice(0, 1), 'asked');
    }
    await until(() => one.lookup(other, chain) === 0, 'what was asked to go');
    expect(await foreign()).toBe(0);
    for (let i = 0; i < 3; i++) await server.cli('get', 'small');
    expect(await foreign()).toBe(3);
  });

  it('a block that another node has stored meanwhile is held, and is there once', async () => {
    const [one, two] = [await open({}, { pollMs: 60_000 }), await open({}, { pollMs: 60_000 })];
    await bench.write(one, space, chain, payloadBytes);
    expect(two.lookup(space, chain)).toBe(0);
    expect(await bench.write(two, space, chain, payloadBytes)).toEqual(chain.map(() => 'held'));
    expect(two.lookup(space, chain)).toBe(8);
    expect((await serverBytes())[1]).toBe(8 * charge);
  });

  it('a batch of which another node has some: the rest is stored, or given back, under one lease', async () => {
    let stops = false;
    const onStep = (step: string): void => {
      if (stops && step === 'redis.write.reserved') throw new KvError('CANCELLED', 'no further');
    };
    const [one, two] = [await open(), await open({}, { pollMs: 60_000, leaseMs: 2_000, onStep })];
    const held = chain.filter((_, i) => i % 3 === 0);
    await bench.write(one, space, held, payloadBytes);
    const leases = async (): Promise<string> => server.cli('zcard', `${base}leases`);
    stops = true;
    expect(await bench.write(two, space, chain, payloadBytes)).toEqual(chain.map(() => 'refused'));
    expect([await leases(), (await serverBytes())[1]]).toEqual(['1', 8 * charge]);
    await until(async () => (await leases()) === '0', 'the reservation to end');
    expect((await serverBytes()).slice(0, 2)).toEqual([held.length * (payloadBytes + 256), held.length * charge]);
    stops = false;
    const news = hashNamed('and a new one');
    const statuses = await bench.write(two, space, [...held, news, hashNamed('and another')], payloadBytes);
    expect(statuses).toEqual([...held.map(() => 'held'), 'stored', 'stored']);
    expect([await leases(), (await serverBytes())[1]]).toEqual(['0', (held.length + 2) * charge]);
    await until(() => one.lookup(space, [news]) === 1, 'the first node');
    expect(await bench.read(one, space, [...held, news], payloadBytes)).toEqual([...held, news].map(() => 'ready'));
  });

  it('writing the same block at once, one stores it and no byte is counted twice', async () => {
    const [one, two] = [await open(), await open()];
    const statuses = await Promise.all([one, two].map((tier) => bench.write(tier, space, chain, payloadBytes)));
    for (const i of chain.keys()) expect(statuses.map((each) => each[i]).sort()).toEqual(['held', 'stored']);
    expect(await serverBytes()).toEqual([8 * (payloadBytes + 256), 8 * charge, 2 << 20]);
  });

  it('a small block in the place of a large one never has its bytes, not even before its own have come', async () => {
    let stops = false;
    const onStep = (step: string): void => {
      if (stops && step === 'redis.write.reserved') throw new KvError('CANCELLED', 'no further');
    };
    const tier = await open({ bytes: 1 << 20 }, { onStep });
    const large = Array.from({ length: 9 }, (_, i) => hashNamed(`large ${i}`));
    expect(await bench.write(tier, space, large, 100_000)).toEqual(large.map(() => 'stored'));
    const small = Array.from({ length: 64 }, (_, i) => hashNamed(`small ${i}`));
    stops = true;
    expect(await bench.write(tier, other, small, 700)).toEqual(small.map(() => 'refused'));
    stops = false;
    const [values, used] = await serverBytes();
    expect(tier.lookup(space, large)).toBe(8); // the last of them made room
    expect(used).toBe(8 * chargeOf(100_256, 4096) + 64 * chargeOf(956, 4096));
    expect(values).toBe(8 * 100_256);
  });

  it('never hold more than the one budget, at any instant, and forget what others evicted', async () => {
    const bytes = 1 << 20;
    const all = await Promise.all([1, 2, 3].map(() => open({ bytes })));
    let writing = true;
    const sampling = (async () => {
      let samples = 0;
      for (; writing || samples === 0; samples++) {
        const [values, used, cap] = await serverBytes();
        expect(cap).toBe(bytes);
        byLaw(3, () => {
          expect(used).toBeLessThanOrEqual(cap);
          expect(values).toBeLessThanOrEqual(used);
        });
      }
      return samples;
    })();
    const names = (node: number, round: number) =>
      Array.from({ length: 8 }, (_, i) => hashNamed(`${node} ${round} ${i}`));
    await Promise.all(
      all.map(async (tier, node) => {
        for (let round = 0; round < 12; round++) {
          const statuses = await bench.write(tier, space, names(node, round), payloadBytes);
          expect(statuses).toEqual(statuses.map(() => 'stored'));
        }
      }),
    );
    writing = false;
    expect(await sampling).toBeGreaterThan(0);
    const held = Number(await server.cli('hlen', `${base}blocks`));
    expect(held).toBe(Math.floor(bytes / charge));
    await until(() => all.every((tier) => tier.stats().blocks === held), 'all nodes list the same');
    for (const tier of all) expect(tier.stats().bytes).toBe(held * charge);
  });

  it('one that starts later lists what is there; recency and accounting are the server’s', async () => {
    const bytes = 20 * charge;
    const one = await open({ bytes });
    await bench.write(one, space, chain, payloadBytes);
    one.touch(space, chain);
    await one.close();
    const two = await open({ bytes });
    expect(two.lookup(space, chain)).toBe(8);
    expect(two.stats()).toMatchObject({ blocks: 8, bytes: 8 * charge });
    // Twelve fit beside them; of thirteen more, the chain's tail goes first.
    await bench.write(
      two,
      other,
      Array.from({ length: 13 }, (_, i) => hashNamed(`new ${i}`)),
      payloadBytes,
    );
    expect(two.lookup(space, chain)).toBe(7);
  });

  it('that start at once, on an empty server and on a damaged one, all come into service', async () => {
    for (let round = 0; round < 6; round++) {
      if (round % 2 === 0) await server.cli('flushall');
      else await server.cli('del', `${base}recency`);
      const [one, two, three] = await Promise.all([open(), open(), open()]);
      expect(await bench.write(one!, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
      for (const each of [two!, three!]) await until(() => each.lookup(space, chain) === 8, 'the chain');
      await Promise.all([one, two, three].map((each) => each!.close()));
      shared.tiers.length = 0;
    }
  });

  it('one that is too far behind lists anew', async () => {
    const [one, two] = [await open(), await open()];
    // No poll falls between the write and the trimming: by events alone the other node never comes to know.
    const polls = vi.spyOn(Directory.prototype, 'poll').mockResolvedValue();
    const lists = vi.spyOn(Directory.prototype, 'list');
    try {
      await bench.write(one, space, chain, payloadBytes);
      await server.cli('xtrim', `${base}events`, 'MAXLEN', '0');
      expect([two.lookup(space, chain), lists.mock.calls.length]).toEqual([0, 0]);
      polls.mockRestore();
      await until(() => two.stats().inService && two.lookup(space, chain) === 8, 'the other node');
      expect(lists).toHaveBeenCalled();
    } finally {
      polls.mockRestore();
      lists.mockRestore();
    }
  });

  it('the budget of the one that started last holds for all', async () => {
    const one = await open();
    await bench.write(one, space, chain, payloadBytes);
    const two = await open({ bytes: 1 << 20 });
    await until(() => one.stats().capacityBytes === 1 << 20, 'the first node');
    expect(two.stats().capacityBytes).toBe(1 << 20);
  });
});

describe('eviction and policy', () => {
  it('evicts children before parents, however late they were written', async () => {
    const tier = await open({ bytes: 10 * charge });
    // One block a write, in chain order: each a child of the one before, as its header says.
    for (const [i, hash] of chain.entries())
      await bench.writeChild(tier, space, hash, chain[i - 1] ?? null, payloadBytes);
    await bench.write(tier, other, [hashNamed('a'), hashNamed('b'), hashNamed('c'), hashNamed('d')], payloadBytes);
    expect(tier.lookup(space, chain)).toBe(6);
    expect(tier.stats()).toMatchObject({ blocks: 10, evictions: 2 });
  });

  it('forgets a namespace’s blocks when their time is over', async () => {
    const digest = Buffer.from(space.digest).toString('hex');
    const tier = await open({ policies: { [digest.slice(0, 8)]: { ttlSeconds: 1 } } });
    const told = { stored: 0, removed: 0, cleared: 0 };
    tier.follow(({ kind, hashes }) => {
      told[kind] += hashes.length;
    });
    await bench.write(tier, space, chain, payloadBytes);
    await bench.write(tier, other, chain.slice(0, 2), payloadBytes);
    await until(() => tier.lookup(space, chain) === 0, 'expiry');
    await until(() => tier.stats().blocks === 2, 'expiry of all');
    expect(told).toEqual({ stored: 10, removed: 8, cleared: 0 });
    expect(await serverBytes()).toEqual([2 * (payloadBytes + 256), 2 * charge, 2 << 20]);
  });

  it('unlists many that end together as soon as one poll sees it', async () => {
    const digest = Buffer.from(space.digest).toString('hex');
    const tier = await open({ policies: { [digest.slice(0, 8)]: { ttlSeconds: 1 } } }, { pollMs: 4_000 });
    const many = Array.from({ length: 300 }, (_, i) => hashNamed(`together ${i}`));
    for (let from = 0; from < 300; from += 50) {
      const some = many.slice(from, from + 50);
      expect(await bench.write(tier, space, some, 1_000)).toEqual(some.map(() => 'stored'));
    }
    await until(() => tier.stats().blocks < 300, 'the first poll after their end');
    const sinceMs = performance.now();
    await until(() => tier.stats().blocks === 0, 'the end of all');
    expect(performance.now() - sinceMs).toBeLessThan(3_000); // no other poll
  });

  it('lets the server remove what has an end of its own, also for those who did not write it', async () => {
    const writer = await open();
    const reader = await open();
    const endS = Math.floor(Date.now() / 1000) + 6;
    await Promise.all([
      bench.write(writer, space, chain.slice(0, 3), payloadBytes, endS),
      bench.write(writer, space, chain.slice(3), payloadBytes),
    ]);
    await until(() => reader.stats().blocks === 8, 'the other node’s view');
    await writer.close();
    await until(() => reader.lookup(space, chain) === 0, 'its end');
    expect(Date.now()).toBeGreaterThanOrEqual(endS * 1000 - 50);
    expect(reader.lookup(space, chain.slice(3))).toBe(5);
  });

  it('takes blocks of one batch that end at different times, or never', async () => {
    const tier = await open();
    const nowS = Math.floor(Date.now() / 1000);
    const blocks = chain.map((hash, i) => {
      const expiresS = [0, nowS + 1, nowS + 3600][i % 3]!;
      return { hash, expiresS, slot: bench.filledSlot(space, hash, payloadBytes, null, expiresS) };
    });
    expect(await tier.write(space, blocks)).toEqual(chain.map(() => 'stored'));
    for (const { slot } of blocks) bench.tier.free(slot);
    await until(() => tier.stats().blocks === 5, 'the end of three');
    expect(await server.cli('zcard', `${base}leases`)).toBe('0');
    expect(await server.cli('zcard', `${base}expiry`)).toBe('2');
    for (const { hash, expiresS } of blocks) expect(tier.lookup(space, [hash])).toBe(expiresS === nowS + 1 ? 0 : 1);
    expect(await serverBytes()).toEqual([5 * (payloadBytes + 256), 5 * charge, 2 << 20]);
  });

  it('measures the end of a block by the clock of its node, not by one that somebody has set for a moment', async () => {
    const endS = Math.floor(Date.now() / 1000) - 86_400;
    const tier = await open({}, { clock: { ...systemClock, wallMs: () => (endS - 3600) * 1000 } });
    expect(await bench.write(tier, space, chain, payloadBytes, endS)).toEqual(chain.map(() => 'stored'));
    await passed(300); // several polls
    expect(tier.lookup(space, chain)).toBe(8);
    const [, score] = (await server.cli('zrange', `${base}expiry`, '0', '0', 'withscores')).split('\n').slice(-2);
    expect(Number(score) - Date.now()).toBeGreaterThan(3_500_000);
  });

  it('gives a namespace its share, and evicts its own blocks for it', async () => {
    const tier = await open({ bytes: 20 * charge, policies: { default: { maxShare: 0.25 } } });
    await bench.write(tier, other, chain.slice(0, 3), payloadBytes);
    await bench.write(tier, space, chain.slice(0, 4), payloadBytes);
    await bench.write(tier, space, chain.slice(4), payloadBytes);
    expect(tier.stats()).toMatchObject({ blocks: 8, evictions: 3 });
    expect(tier.lookup(other, chain)).toBe(3);
  });

  it('writes nothing of a namespace that is read only', async () => {
    const tier = await open({ policies: { default: { readOnly: true } } });
    expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'refused'));
    expect(await serverBytes()).toEqual([0, 0, 2 << 20]);
  });
});

describe('what is not right', () => {
  it('a flipped bit is a corrupt block: counted, removed everywhere, never delivered', async () => {
    const [one, two] = [await open(), await open()];
    await bench.write(one, space, chain, payloadBytes);
    const entry = (await server.cli('--no-raw', 'hvals', `${base}blocks`)).split('\n')[0]!;
    const id = entry.split(' ').at(-1)!.replaceAll('"', '');
    await server.cli('setrange', `${base}v:${id}:2`, '1000', '!');
    const statuses = await bench.read(one, space, chain, payloadBytes);
    expect([...statuses].sort()).toEqual(['corrupt', ...Array(7).fill('ready')].sort());
    expect(one.stats()).toMatchObject({ blocks: 7, corrupt: 1 });
    await until(() => two.stats().blocks === 7, 'the other node');
    expect((await serverBytes())[1]).toBe(7 * charge);
  });

  it('a value that is gone, short or long is a miss or corrupt, and its entry goes', async () => {
    const tier = await open();
    await bench.write(tier, space, chain.slice(0, 3), payloadBytes);
    const ids = (await server.cli('--no-raw', 'hvals', `${base}blocks`)).split('\n');
    const keys = ids.map((entry) => `${base}v:${entry.split(' ').at(-1)!.replaceAll('"', '')}:1`);
    await server.cli('del', keys[0]!);
    await server.cli('append', keys[1]!, 'more');
    await server.cli('set', keys[2]!, 'less');
    const statuses = await bench.read(tier, space, chain.slice(0, 3), payloadBytes);
    expect([...statuses].sort()).toEqual(['corrupt', 'corrupt', 'missing']);
    expect(tier.stats().blocks).toBe(0);
    expect(await bench.write(tier, space, chain.slice(0, 3), payloadBytes)).toEqual(['stored', 'stored', 'stored']);
    expect(await bench.read(tier, space, chain.slice(0, 3), payloadBytes)).toEqual(['ready', 'ready', 'ready']);
  });

  it('a block that is too large for who reads it counts as held there no more, and stays as it is for others', async () => {
    const [one, two] = [await open(), await open()];
    await bench.write(one, space, chain.slice(0, 2), payloadBytes);
    await until(() => two.lookup(space, chain) === 2, 'the other node');
    const told: string[] = [];
    two.follow((change) => told.push(`${change.kind} ${change.hashes.length}`));
    told.length = 0;
    expect(await bench.read(two, space, chain.slice(0, 1), 700)).toEqual(['missing']);
    expect([two.lookup(space, chain), told]).toEqual([0, ['removed 1']]);
    // Who offers it hears that the server has it, and lists it until the next read.
    expect(await bench.write(two, space, chain.slice(0, 1), 700)).toEqual(['held']);
    expect(two.lookup(space, chain)).toBe(2);
    expect(await bench.read(two, space, chain.slice(0, 1), 700)).toEqual(['missing']);
    await passed(300); // several polls
    expect([two.lookup(space, chain), one.lookup(space, chain)]).toEqual([0, 2]);
    expect(await bench.read(one, space, chain.slice(0, 2), payloadBytes)).toEqual(['ready', 'ready']);
    expect((await serverBytes())[1]).toBe(2 * charge);
  });

  it.each(['redis.write.reserved', 'redis.write.parts', 'redis.write.committed'])(
    'a node that is killed at %s leaves nothing half, and its reservation ends',
    async (step) => {
      const dir = mkdtempSync(join(tmpdir(), 'kvtier-redis-writer-'));
      const tier = await open({}, { leaseMs: 1500 });
      const [program] = await bundled(new URL('./testing/redis-writer.ts', import.meta.url));
      const child = spawn(process.execPath, [program], {
        cwd: root,
        env: {
          ...process.env,
          KVTIER_TEST: JSON.stringify({
            ...{ url: server.url, bytes: 2 << 20, payloadBytes, dir, leaseMs: 1500, killAt: { step, pass: 3 } },
          }),
        },
        stdio: ['ignore', 'pipe', 'inherit'],
      });
      let output = '';
      child.stdout.on('data', (text) => {
        output += text;
      });
      const [, signal] = await once(child, 'close');
      rmSync(dir, { recursive: true });
      expect(signal).toBe('SIGKILL');
      const stored = output
        .split('\n')
        .filter((line) => /^\d+$/.test(line))
        .map(Number);
      expect(stored).toEqual([0, 1, 2, 3, 4, 5, 6, 7]);
      const writer = namespaceNamed('writer');
      const third = [8, 9, 10, 11].map(hashNamed);
      const isListed = step === 'redis.write.committed';
      const held = isListed ? 12 : 8;
      const expected = `${held * (payloadBytes + 256)} ${held * charge} ${2 << 20}`;
      await until(async () => (await serverBytes()).join(' ') === expected, 'the end of the reservation');
      await until(() => tier.stats().blocks === held, 'the list');
      expect(await bench.read(tier, writer, third, payloadBytes)).toEqual(
        third.map(() => (isListed ? 'ready' : 'missing')),
      );
      expect(await bench.read(tier, writer, stored.map(hashNamed), payloadBytes)).toEqual(stored.map(() => 'ready'));
    },
  );

  it('a writer that slept over its reservation writes nothing, and nothing counts', async () => {
    const tier = await open({}, { leaseMs: 1, pollMs: 60_000 });
    const late = await open({}, { leaseMs: 60_000 });
    // The other node gives the expired reservation back before the writer comes to its commit.
    const statuses = await bench.write(tier, space, chain, payloadBytes);
    await until(() => late.stats().bytes === late.stats().blocks * charge, 'the reservation');
    const storedCount = statuses.filter((status) => status === 'stored').length;
    const [values, used] = await serverBytes();
    expect([values, used]).toEqual([storedCount * (payloadBytes + 256), storedCount * charge]);
  });
});

describe('refused at start, in one line', () => {
  const refused = async (settings: Parameters<typeof open>[0]): Promise<string> => {
    const error = await open(settings).then(
      () => new Error('it opened'),
      (thrown: Error) => thrown,
    );
    expect(error.message).not.toContain('\n');
    return `${(error as { code?: string }).code} ${error.message}`;
  };

  it('servers that are not there or not named right', async () => {
    expect(await refused({ servers: ['redis://127.0.0.1:1'], timeLimitMs: 300 })).toMatch(/^IO redis: .*ECONNREFUSED/);
    expect(await refused({ servers: ['http://a'] })).toMatch(/^CONFIG redis: http:\/\/a has the scheme http:/);
    expect(await refused({ servers: ['redis://u:secret@h/9'] })).toMatch(/^CONFIG redis: redis:\/\/h\/9 has a path/);
    expect(await refused({ servers: [server.url.replace('redis:', 'rediss:')], timeLimitMs: 500 })).toMatch(
      /^(IO|CONFIG|DEADLINE) redis: /,
    );
    expect(await refused({ mode: 'cluster', timeLimitMs: 500 })).toMatch(/^CONFIG redis: .*set mode to single/);
    expect(await refused({ mode: 'sentinel', masterName: 'm', timeLimitMs: 500 })).toMatch(/redis: .*/);
    expect(await refused({ database: 99 })).toMatch(/^CONFIG redis: .*correct database/);
    expect(await refused({ tls: { caFile: '/none' } })).toMatch(/^CONFIG redis: tls is configured/);
    expect(await refused({ servers: ['rediss://h'], tls: { caFile: '/none' } })).toMatch(
      /^CONFIG redis\.tls\.caFile: \/none: cannot be used \(ENOENT.*; name a readable PEM file$/,
    );
  });

  it('credentials that the server does not take', async () => {
    await server.cli('acl', 'setuser', 'kv', 'on', '>right', ...aclRules('kvtier:').split(' '));
    expect(await refused({ username: 'kv', password: 'wrong' })).toMatch(
      /^CONFIG redis: WRONGPASS .*correct username and password/,
    );
    await server.cli('acl', 'setuser', 'kv', '-evalsha');
    expect(await refused({ username: 'kv', password: 'right' })).toMatch(/^CONFIG redis: NOPERM .*docs\/operating.md/);
    await server.cli('acl', 'setuser', 'kv', '+evalsha', '-set');
    expect(await refused({ username: 'kv', password: 'right' })).toMatch(/^CONFIG redis: .*docs\/operating.md/);
    await server.cli('acl', 'setuser', 'kv', '+set');
    await open({ username: 'kv', password: 'right' });
    await server.cli('acl', 'deluser', 'kv');
  });

  it('a budget above the server’s memory', async () => {
    await server.cli('config', 'set', 'maxmemory', '3mb');
    try {
      expect(await refused({ bytes: 4 << 20 })).toMatch(
        /^CONFIG redis: 4194304 bytes of budget at .* maxmemory is 3145728/,
      );
    } finally {
      await server.cli('config', 'set', 'maxmemory', '0');
    }
  });

  it('keys of others under its own names, which stay as they are', async () => {
    await server.cli('set', `${base}ledger`, 'mine');
    expect(await refused({})).toMatch(/^CONFIG redis: kvtier:\{p0\}:ledger is a string; choose another keyPrefix/);
    expect(await server.cli('get', `${base}ledger`)).toBe('mine');
    await server.cli('del', `${base}ledger`);
    await server.cli('hset', `${base}ledger`, 'format', 'other');
    expect(await refused({})).toMatch(/^CONFIG redis: .* has format other/);
    await server.cli('flushall');
    await server.cli('set', 'kvtier:mine', 'x');
    await server.cli('hset', `${base}v:mine`, 'a', 'b');
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    expect(await server.cli('get', 'kvtier:mine')).toBe('x');
    expect(await server.cli('hget', `${base}v:mine`, 'a')).toBe('b');
  });
});
