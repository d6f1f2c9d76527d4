/**
 * One partition as an older program left it, on a real server (golden/redis-partition.json): this program lists, reads, sweeps and
 * follows it, and writes the same. All keys of it: a value in two parts, a lease, an event of each kind.
 */
import { readFileSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { encodeHeader, type HashKey, headerBytes, namespaceFromDigest } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { type RedisServer, until } from '../../../../../infra/redis/servers.ts';
import { payloadOf, type TestBench } from '../kit/testing/objects.ts';
import { Directory } from './directory.ts';
import { type Partition, RedisCommands } from './redis-commands.ts';
import { RedisIndex } from './redis-index.ts';
import { parsePolled, type Reply } from './replies.ts';
import { chargeOf } from './script-pieces.ts';
import { pollScript } from './scripts.ts';
import { defaultSettings } from './settings.ts';
import { sharedServer } from './testing/shared-server.ts';

interface Golden {
  readonly ledger: Readonly<Record<string, string>>;
  readonly blocks: Readonly<Record<string, string>>;
  /** Member and score. */
  readonly recency: readonly (readonly [string, string])[];
  readonly leases: readonly (readonly [string, string])[];
  readonly expiry: readonly (readonly [string, string])[];
  /** Id and fields. */
  readonly events: readonly (readonly [string, readonly string[]])[];
  /** By key: bytes as hex, and when the key ends by itself (ms; -1: never). */
  readonly values: Readonly<Record<string, readonly [string, number]>>;
}

const golden = JSON.parse(
  readFileSync(new URL('../../golden/redis-partition.json', import.meta.url), 'utf8'),
) as Golden;
/** Names that can be read in the golden file. */
const space = namespaceFromDigest(Buffer.alloc(32, 'n'));
const hashOf = (letter: string, bytes: number): HashKey => letter.repeat(bytes) as HashKey;
const [a, b, c, d] = [hashOf('a', 32), hashOf('b', 16), hashOf('c', 32), hashOf('d', 16)];
const payloadBytes = 300;
const bytes = headerBytes + payloadBytes;
const partBytes = 400;
const charge = chargeOf(bytes, partBytes);
const capacityBytes = 1 << 20;
const node = 'golden';
/** As long as the first block lives: to the year 2100. */
const endMs = 4_102_444_800_000;

const shared = sharedServer();
let server: RedisServer;
let bench: TestBench;
let commands: RedisCommands;
let partition: Partition;
beforeEach(async () => {
  ({ server, bench } = shared);
  const settings = { ...defaultSettings, servers: [server.url], bytes: capacityBytes };
  commands = new RedisCommands(settings, () => {});
  partition = commands.partitions()[0]!;
  await commands.ready(10_000);
  await commands.loadScripts(true);
});
afterEach(() => commands.close());

const ask = (name: string, ...args: (string | number | Buffer)[]): Promise<Reply> =>
  commands.command(
    partition,
    name,
    args.map((each) => (typeof each === 'string' ? Buffer.from(each, 'latin1') : each)),
  );
const textOf = (reply: Reply): string => (reply as Buffer).toString('latin1');
const textsOf = (reply: Reply): string[] => (reply as Reply[]).map(textOf);
const pairsOf = (texts: readonly string[]): [string, string][] =>
  texts.flatMap((text, i) => (i % 2 === 0 ? [[text, texts[i + 1]!] as [string, string]] : []));
const keyOf = (name: string): string => partition.base + name;

async function load({ ledger, blocks, values, events, ...sets }: Golden): Promise<void> {
  await ask('HSET', keyOf('ledger'), ...Object.entries(ledger).flat());
  await ask('HSET', keyOf('blocks'), ...Object.entries(blocks).flat());
  for (const [name, members] of Object.entries(sets))
    for (const [member, score] of members) await ask('ZADD', keyOf(name), score, member);
  for (const [id, fields] of events) await ask('XADD', keyOf('events'), id, ...fields);
  for (const [key, [hex, end]] of Object.entries(values)) {
    await ask('SET', key, Buffer.from(hex, 'hex'));
    if (end >= 0) await ask('PEXPIREAT', key, end);
  }
}

async function dump(): Promise<Golden> {
  const membersOf = async (name: string): Promise<[string, string][]> =>
    pairsOf(textsOf(await ask('ZRANGE', keyOf(name), 0, -1, 'WITHSCORES')));
  const recordOf = async (name: string): Promise<Record<string, string>> =>
    Object.fromEntries(pairsOf(textsOf(await ask('HGETALL', keyOf(name)))));
  const values: Record<string, [string, number]> = {};
  const names = ['ledger', 'blocks', 'recency', 'leases', 'expiry', 'events'].map(keyOf);
  for (const key of textsOf(await ask('KEYS', '*')).sort()) {
    if (names.includes(key)) continue;
    values[key] = [((await ask('GET', key)) as Buffer).toString('hex'), (await ask('PEXPIRETIME', key)) as number];
  }
  const events = ((await ask('XRANGE', keyOf('events'), '-', '+')) as [Reply, Reply][]).map(
    ([id, fields]): [string, string[]] => [textOf(id), textsOf(fields)],
  );
  return {
    ...{ ledger: await recordOf('ledger'), blocks: await recordOf('blocks') },
    ...{ recency: await membersOf('recency'), leases: await membersOf('leases'), expiry: await membersOf('expiry') },
    ...{ events, values },
  };
}

/** Without what each life and each run has of its own, which has the form that it must have. */
function settled({ ledger, recency, leases, expiry, events, values, ...rest }: Golden): object {
  const formed = (text: string, form: RegExp): string => {
    expect(text).toMatch(form);
    return String(form);
  };
  const scored = (members: Golden['leases'], form: RegExp) => members.map(([name, at]) => [name, formed(at, form)]);
  const [us, ms] = [/^\d{16}$/, /^\d{13}$/];
  const times = { clock: formed(ledger.clock!, us), at: formed(ledger.at!, us) };
  return {
    ...{ ...rest, ledger: { ...ledger, ...times, epoch: formed(ledger.epoch!, /^[\w-]{16}$/) } },
    ...{ recency: scored(recency, us), leases: scored(leases, ms), expiry: scored(expiry, ms) },
    events: events.map(([id, fields]) => [formed(id, /^\d-\d{16}$/).concat(id[0]!), fields]),
    values: Object.fromEntries(
      Object.entries(values).map(([key, [hex, end]]) => [key, [hex, end < 0 ? end : formed(String(end), ms)]]),
    ),
  };
}

function objectOf(hash: HashKey): Buffer {
  const payload = payloadOf(space, hash, payloadBytes);
  const payloadChecksum = native.xxh3_64(payload);
  const fields = { namespace: space.digest, hash, parent: null, tokenCount: 16, payloadBytes, payloadChecksum };
  return Buffer.concat([encodeHeader(fields), payload]);
}

/** What the golden file is of: two blocks stored, one removed, and two that are being written. */
async function write(): Promise<void> {
  const directory = new Directory(partition, commands, new RedisIndex(), node);
  expect(await directory.open(1, capacityBytes)).toBe(true);
  const blocks = [a, b, c, d].map((hash, i) => ({ hash, bytes, id: `${node}.${i}` }));
  const terms = { leaseMs: 60_000, partBytes, share: undefined };
  const first = blocks.slice(0, 2);
  expect(await directory.reserve(space, first, terms)).toEqual({ answers: ['done', 'done'], evicted: 0 });
  for (const { hash, id } of first) {
    const object = objectOf(hash);
    for (const part of [0, 1]) {
      const key = keyOf(`v:${id}:${part}`);
      await ask('SET', key, object.subarray(part * partBytes, (part + 1) * partBytes), 'XX');
    }
  }
  const usedUs = performance.now() * 1000;
  const written = first.map((block, i) => {
    return { ...block, written: true, usedUs, ttlMs: i === 0 ? endMs - Date.now() : undefined };
  });
  expect(await directory.commit(space, written, partBytes)).toEqual(['done', 'done']);
  await directory.remove(space, [{ hash: b, text: `${bytes} ${partBytes} ${node}.1` }]);
  expect(await directory.reserve(space, blocks.slice(2), terms)).toEqual({ answers: ['done', 'done'], evicted: 0 });
}

it('the same blocks are written as they were', async () => {
  await write();
  expect(settled(await dump())).toEqual(settled(golden));
});

describe('what an older program left', () => {
  it('is listed and read, and a lease that has ended is swept with its keys and its charge', async () => {
    await load(golden);
    expect(await dump()).toEqual(golden); // all of it is on the server
    const tier = await shared.open({ bytes: capacityBytes });
    expect(tier.stats()).toMatchObject({ inService: true, blocks: 1, detail: { nonsense: 0 } });
    expect([a, b, c, d].map((hash) => tier.lookup(space, [hash]))).toEqual([1, 0, 0, 0]);
    expect(await bench.read(tier, space, [a], payloadBytes)).toEqual(['ready']);
    await until(() => tier.stats().bytes === charge, 'the sweep');
    const { leases, values, ledger, blocks } = await dump();
    expect(leases).toEqual([]);
    expect(Object.keys(values)).toEqual([0, 1].map((part) => keyOf(`v:golden.0:${part}`)));
    const { epoch, format } = golden.ledger;
    expect(ledger).toMatchObject({
      epoch,
      format,
      used: String(charge),
      count: '1',
      [`ns:${'n'.repeat(32)}`]: String(charge),
    });
    expect(blocks).toEqual(golden.blocks);
  });

  it('is followed, event by event', async () => {
    const { events, ledger } = golden;
    await load({ ...golden, events: [], ledger: { ...ledger, events: '0', at: '0' } });
    const index = new RedisIndex();
    const directory = new Directory(partition, commands, index, 'ours');
    expect(await directory.open(1, capacityBytes)).toBe(false);
    await ask('HSET', keyOf('ledger'), 'events', ledger.events!, 'at', ledger.at!);
    for (const [id, fields] of events) await ask('XADD', keyOf('events'), id, ...fields);
    const { news } = parsePolled(await commands.run(pollScript, partition, ['ours', 0, 100]), 0);
    const told = news.map(({ isRemoval, node: by, changes }) => ({ isRemoval, by, changes: changes() }));
    const nameOf = (hash: HashKey, id: string) => ({ namespace: space.key, hash, text: `${bytes} ${partBytes} ${id}` });
    expect(told).toEqual([
      { isRemoval: false, by: node, changes: [nameOf(a, 'golden.0'), nameOf(b, 'golden.1')] },
      { isRemoval: true, by: node, changes: [nameOf(b, 'golden.1')] },
    ]);
    await directory.poll();
    expect([a, b].map((hash) => index.get(space, hash)?.text)).toEqual([`${bytes} ${partBytes} golden.0`, undefined]);
  });
});
