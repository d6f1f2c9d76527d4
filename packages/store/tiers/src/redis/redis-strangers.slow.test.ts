/** Somebody else writes into the database, or it goes back in time: misses, and never a wrong block, a crash or an endless loop. */
import { setTimeout as passed } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import fc from 'fast-check';
import { beforeEach, describe, expect, it } from 'vitest';
import { type RedisServer, until } from '../../../../../infra/redis/servers.ts';
import { hashNamed, namespaceNamed, type TestBench } from '../kit/testing/objects.ts';
import { Directory } from './directory.ts';
import { RedisCommands } from './redis-commands.ts';
import { RedisIndex } from './redis-index.ts';
import { chargeOf } from './script-pieces.ts';
import { defaultSettings } from './settings.ts';
import { sharedServer } from './testing/shared-server.ts';

const payloadBytes = 20_000;
const charge = chargeOf(payloadBytes + 256, 4096);
const space = namespaceNamed('one');
const other = namespaceNamed('two');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const base = 'kvtier:{p0}:';
const keys = ['ledger', 'blocks', 'recency', 'leases', 'expiry', 'events'].map((name) => base + name);

const shared = sharedServer();
const { open } = shared;
let server: RedisServer;
let bench: TestBench;
beforeEach(() => {
  ({ server, bench } = shared);
});
const lua = (program: string): Promise<string> => server.cli('eval', program, '0');

describe('nonsense', () => {
  it.each([['*'], ['999-1'], ['2-1']])(
    'an event under %s that is none costs nobody his life, and no block',
    async (id) => {
      const [one, two] = [await open(), await open()];
      await bench.write(one, space, chain.slice(0, 1), payloadBytes);
      await until(() => two.lookup(space, chain) === 1, 'the first block');
      await server.cli('xadd', `${base}events`, id, 'foo', 'bar');
      await passed(300); // several polls
      expect(await bench.write(one, space, chain.slice(1), payloadBytes)).toEqual(chain.slice(1).map(() => 'stored'));
      await until(() => two.lookup(space, chain) === 8, 'the other node');
      expect(await bench.read(two, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
      const three = await open();
      expect(three.lookup(space, chain)).toBe(8);
      // Once in the stream it is not met again and again.
      const lost = [one, two, three].map((tier) => tier.stats().detail!.connections_lost);
      await passed(500);
      expect([one, two, three].map((tier) => tier.stats().inService)).toEqual([true, true, true]);
      expect([one, two, three].map((tier) => tier.stats().detail!.connections_lost)).toEqual(lost);
    },
  );

  it('a node whose first listing ends early lists nothing of it when it is back', async () => {
    const writer = await open();
    await bench.write(writer, space, chain, payloadBytes);
    await writer.close();
    const { poll } = Directory.prototype;
    Directory.prototype.poll = async () => {
      Directory.prototype.poll = poll;
      await server.cli('flushall'); // it lists blocks now that are no more
      throw new KvError('IO', 'redis: the server sent an event that is none', { retry: true });
    };
    shared.tiers = [await open({}, { openWithoutServer: true })];
    expect(shared.tiers[0]!.stats()).toMatchObject({ inService: false, blocks: 0 });
    await until(() => shared.tiers[0]!.stats().inService, 'the next attempt');
    expect([shared.tiers[0]!.stats().blocks, shared.tiers[0]!.lookup(space, chain)]).toEqual([0, 0]);
  });

  it.each(['2000256 0 x', '20256 1 x', '20256 NaN x', 'NaN 4096 x', '', '20256 4096 a b', '999999999999999 1 x'])(
    'an entry %j is no block: it goes, the others are read, and its block can be stored again',
    async (entry) => {
      const writer = await open();
      await bench.write(writer, space, chain, payloadBytes);
      await lua(
        `local names = redis.call('HKEYS', '${base}blocks') redis.call('HSET', '${base}blocks', names[3], '${entry}')`,
      );
      const tier = await open();
      expect(tier.stats()).toMatchObject({ blocks: 7, detail: { nonsense: 1 } });
      const statuses = await bench.read(tier, space, chain, payloadBytes);
      expect([...statuses].sort()).toEqual(['missing', ...Array(7).fill('ready')]);
      expect(await server.cli('hlen', `${base}blocks`)).toBe('7');
      const again = chain.filter((_, i) => statuses[i] === 'missing');
      expect(await bench.write(tier, space, again, payloadBytes)).toEqual(['stored']);
      expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    },
  );

  it('an entry that turns into nonsense while nodes look on is made way for, by writing and by eviction', async () => {
    const tier = await open({ bytes: 10 * charge });
    await bench.write(tier, space, chain, payloadBytes);
    tier.remove(space, chain.slice(0, 1), 'asked');
    await until(async () => (await server.cli('hlen', `${base}blocks`)) === '7', 'the removal');
    await lua(
      `for _, name in ipairs(redis.call('HKEYS', '${base}blocks')) do redis.call('HSET', '${base}blocks', name, 'x') end`,
    );
    const fresh = Array.from({ length: 10 }, (_, i) => hashNamed(`fresh ${i}`));
    // What those were charged nobody knows any more: the directory begins anew, with all of its budget.
    await until(
      async () => (await bench.write(tier, other, fresh, payloadBytes)).every((status) => status === 'stored'),
      'room',
    );
    expect(tier.stats()).toMatchObject({ inService: true, blocks: 10, bytes: 10 * charge });
    const next = await open({ bytes: 10 * charge });
    expect(await bench.write(next, space, chain.slice(3, 4), payloadBytes)).toEqual(['stored']);
  });

  it('leases, numbers and recency of nobody’s making are swept, mended or begun anew', async () => {
    const tier = await open();
    await bench.write(tier, space, chain, payloadBytes);
    for (const lease of ['x', '0 a 5\nq', '4096 a NaN\n', '4096 a 20256 b 20256\nq', ''])
      await server.cli('zadd', `${base}leases`, '1', lease);
    await server.cli('zadd', `${base}expiry`, '1', 'nobody');
    await until(async () => (await server.cli('zcard', `${base}leases`)) === '0', 'the leases');
    expect(await bench.read(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'ready'));
    for (const [field, value] of [
      ['used', 'x'],
      ['events', '-5'],
      ['count', 'nan'],
      ['cap', '1.5'],
      ['cap', '0'],
      ['cap', '4095'],
    ] as const) {
      await server.cli('hset', `${base}ledger`, field, value);
      await until(async () => (await server.cli('hget', `${base}ledger`, field)) !== value, field);
      await until(() => tier.stats().inService, 'service');
      expect(await bench.write(tier, space, chain, payloadBytes)).toEqual(chain.map(() => 'stored'));
    }
    expect(tier.stats().bytes).toBe(8 * charge);
  });

  it('any bytes anywhere: reads and writes end, no other block is delivered, and service comes back', async () => {
    const junk = fc.oneof(
      fc.string({ maxLength: 12 }),
      fc.constantFrom('0', '-1', '1e300', 'nan', '20256 4096 x', '20256 0 x', '5', '999999999999999999'),
    );
    const act = fc.record({ where: fc.nat(6), key: fc.nat(40), value: junk, field: junk });
    const program = `local keys, where, key, value, field = KEYS, tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], ARGV[4]
      local function pick(list) if #list > 0 then return list[key % #list + 1] end end
      if where == 0 then redis.pcall('HSET', keys[1], pick(redis.call('HKEYS', keys[1])) or field, value)
      elseif where == 1 then redis.pcall('HSET', keys[2], pick(redis.call('HKEYS', keys[2])) or field, value)
      elseif where == 2 then redis.pcall('ZADD', keys[3], key, value)
      elseif where == 3 then redis.pcall('ZADD', keys[4], key, value)
      elseif where == 4 then redis.pcall('XADD', keys[6], key % 3 == 0 and '*' or (key .. '-1'), 'n', field, 's', value, 'e', field)
      elseif where == 5 then redis.pcall('HDEL', keys[2], pick(redis.call('HKEYS', keys[2])) or field)
      else local name = pick(redis.call('KEYS', '*v:*')) if name then redis.pcall('SETRANGE', name, key, value) end end`;
    const [one, two] = [await open(), await open()];
    const property = fc.asyncProperty(fc.array(act, { minLength: 1, maxLength: 4 }), async (acts) => {
      await bench.write(one, space, chain, payloadBytes);
      for (const { where, key, value, field } of acts) {
        await server.cli('eval', program, String(keys.length), ...keys, String(where), String(key), value, field);
        // bench.read compares what is 'ready' with what was written.
        await bench.read(two, space, chain, payloadBytes);
        await bench.write(two, space, chain.slice(0, 4), payloadBytes);
      }
      // Somebody who writes what the format has is believed: his word of another format is not mended.
      if ((await server.cli('hget', `${base}ledger`, 'format')) !== 'kvtier-redis-2') await server.cli('del', ...keys);
      if ((await server.cli('hget', `${base}ledger`, 'partitions')) !== '1') await server.cli('del', ...keys);
      const fresh = [hashNamed(`fresh ${Math.random()}`)];
      for (const tier of [one, two]) {
        await until(async () => {
          const [status] = await bench.write(tier, other, fresh, payloadBytes);
          return status !== 'refused' && (await bench.read(tier, other, fresh, payloadBytes))[0] === 'ready';
        }, 'service');
      }
    });
    await fc.assert(property, { numRuns: 12 });
  });
});

describe('time', () => {
  const snapshot = (): Promise<string> =>
    lua(`for _, key in ipairs({'${keys.join("','")}'}) do redis.call('COPY', key, 'then:' .. key, 'REPLACE') end`);
  const goBack = (): Promise<string> =>
    lua(`for _, key in ipairs({'${keys.join("','")}'}) do
      redis.call('DEL', key) if redis.call('EXISTS', 'then:' .. key) == 1 then redis.call('RENAME', 'then:' .. key, key) end end`);

  it('older data with the same epoch is listed anew', async () => {
    const tier = await open();
    await bench.write(tier, space, chain.slice(0, 4), payloadBytes);
    await passed(150); // it has polled
    await snapshot();
    await bench.write(tier, space, chain.slice(4), payloadBytes);
    await passed(150);
    expect(tier.lookup(space, chain)).toBe(8);
    await goBack();
    await until(() => tier.stats().blocks === 4, 'the older state');
    expect(tier.lookup(space, chain)).toBe(4);
  });

  it('older data whose events have caught up is listed anew', async () => {
    const [one, two] = [await open({}, { pollMs: 20 }), await open({}, { pollMs: 1_500 })];
    await bench.write(one, space, chain.slice(0, 2), payloadBytes);
    await until(() => two.lookup(space, chain) === 2, 'the first two');
    await snapshot();
    await bench.write(one, space, chain.slice(2), payloadBytes);
    await until(() => two.lookup(space, chain) === 8, 'all of them');
    await goBack();
    // While it lists, it writes nothing yet.
    await until(() => one.stats().blocks === 2 && one.stats().inService, 'the quick node');
    for (const hash of chain.slice(0, 6))
      expect(await bench.write(one, other, [hash], payloadBytes)).toEqual(['stored']);
    await until(() => two.lookup(other, chain.slice(0, 6)) === 6, 'the slow node hears of the new ones');
    expect(two.lookup(space, chain)).toBe(2);
  });

  it('a clock that was set back by an hour: what is used now is still the newest', async () => {
    const bytes = 20 * charge;
    const before = await open({ bytes });
    await bench.write(before, space, chain, payloadBytes);
    await before.close();
    // An hour ahead, as the server was when it did this; then its clock was mended.
    await lua(`local ahead = 3600000000
      for _, name in ipairs(redis.call('ZRANGE', '${base}recency', 0, -1)) do redis.call('ZINCRBY', '${base}recency', ahead, name) end
      redis.call('HINCRBY', '${base}ledger', 'clock', ahead)`);
    const tier = await open({ bytes });
    const news = Array.from({ length: 8 }, (_, i) => hashNamed(`new ${i}`));
    await bench.write(tier, space, news, payloadBytes);
    const more = Array.from({ length: 8 }, (_, i) => hashNamed(`more ${i}`));
    await bench.write(tier, space, more, payloadBytes);
    expect([tier.lookup(space, chain), tier.lookup(space, news), tier.lookup(space, more)]).toEqual([4, 8, 8]);
  });
});

describe('values that no entry names', () => {
  it('are swept by who found no directory, and never those of a directory that another has made meanwhile', async () => {
    const settings = { ...defaultSettings, servers: [server.url], bytes: 2 << 20, partBytes: 4096 };
    const links = [0, 1].map(() => new RedisCommands(settings, () => {}));
    await Promise.all(links.map((commands) => commands.ready(2_000)));
    for (const commands of links) await commands.loadScripts(true);
    const [partition] = links[0]!.partitions();
    await lua(`for i = 1, 50 do redis.call('SET', '${base}v:old.' .. i .. ':0', 'old') end`);
    // The first one looks at what is there, and acts on it only after the second one has made a directory and begun to write.
    let goOn = (): void => {};
    const mayGoOn = new Promise<void>((resolve) => {
      goOn = resolve;
    });
    let looked = (): void => {};
    const hasLooked = new Promise<void>((resolve) => {
      looked = resolve;
    });
    let isSecondDone = false;
    const slow = new Proxy(links[0]!, {
      get(target, name) {
        if (name !== 'command')
          return Reflect.get(target, name, target)?.bind?.(target) ?? Reflect.get(target, name, target);
        return async (...args: Parameters<RedisCommands['command']>) => {
          if (args[1] !== 'SCAN' || isSecondDone) return target.command(...args);
          looked();
          await mayGoOn;
          return target.command(...args); // sees the other one's values, too
        };
      },
    });
    const [first, second] = [slow, links[1]!].map(
      (commands, i) => new Directory(partition!, commands, new RedisIndex(), `node${i}`),
    );
    const opening = first!.open(1, 2 << 20);
    await hasLooked;
    expect(await second!.open(1, 2 << 20)).toBe(true);
    const blocks = [{ hash: chain[0]!, id: 'node1.0', bytes: 8_000 }];
    const { answers } = await second!.reserve(space, blocks, { leaseMs: 60_000, partBytes: 4096, share: undefined });
    expect(answers).toEqual(['done']);
    isSecondDone = true;
    goOn();
    const isNew = await opening;
    expect((await server.cli('keys', `${base}v:*`)).split('\n').sort()).toEqual([
      `${base}v:node1.0:0`,
      `${base}v:node1.0:1`,
    ]);
    expect(isNew).toBe(false);
    for (const commands of links) commands.close();
  });
});
