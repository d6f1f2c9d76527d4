/** The feed over real sockets: engines and nodes that publish, restart, lie and fall silent, as a router sees them. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type NodeRecord, nodeRecordSchema, workerRecordSchema } from '@kvtier/config';
import { type KvEvent, KvEventPublisher, type KvEventPublisherOptions } from '@kvtier/events';
import { ChainHasher, hashKeyOf } from '@kvtier/identity';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import type { Keys } from '../keys.ts';
import { keysOfHashes } from '../keys.ts';
import type { FollowedWorker } from './followed.ts';
import { IndexFeed, type IndexFeedOptions } from './index-feed.ts';
import { Reliance } from './reliance.ts';
import { subscribeWith } from './subscribe.ts';

const blockTokens = 16;
const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
const namespace = '0011223344556677';

/** A prompt of so many blocks, with its hashes as events have them and as the index has them. */
function promptOf(seed: number, blocks: number) {
  const tokens = Uint32Array.from({ length: blocks * blockTokens }, (_, i) => (seed * 7_919 + i * 31) % 30_000);
  const packed = hasher.hashBlocks(null, tokens);
  const hashes = Array.from({ length: blocks }, (_, i) => hashKeyOf(packed.subarray(32 * i, 32 * i + 32)));
  return { tokens: [...tokens], hashes, keys: keysOfHashes(packed, 32) };
}
type Prompt = ReturnType<typeof promptOf>;

const stored = ({ hashes, tokens }: Prompt, from = 0, to = hashes.length, more: object = {}): KvEvent => ({
  type: 'BlockStored',
  blockHashes: hashes.slice(from, to),
  parentBlockHash: from === 0 ? null : hashes[from - 1]!,
  tokenIds: tokens.slice(from * blockTokens, to * blockTokens),
  ...{ blockSize: blockTokens, loraId: null, loraName: null, medium: 'GPU', ...more },
});

let folder: string;
let feed: IndexFeed | undefined;
const publishers: KvEventPublisher[] = [];
const lines: string[] = [];
const warnings: string[] = [];
const logger = {
  info: (_: object, message: string): void => void lines.push(message),
  warn: (_: object, message: string): void => void [lines, warnings].map((all) => all.push(message)),
};

beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-feed-'));
  lines.length = 0;
  warnings.length = 0;
});
afterEach(async () => {
  feed?.close();
  for (const publisher of publishers.splice(0)) await publisher.close();
  rmSync(folder, { recursive: true });
});

function open(options: Partial<IndexFeedOptions> = {}): IndexFeed {
  feed = new IndexFeed({ maxBytes: 8 << 20, blockTokens, logger, ...options });
  return feed;
}

const endpointsOf = (name: string) => ({
  endpoint: `ipc://${folder}/${name}`,
  replayEndpoint: `ipc://${folder}/${name}-replay`,
});

async function publish(name: string, options: Partial<KvEventPublisherOptions> = {}): Promise<KvEventPublisher> {
  const publisher = await KvEventPublisher.start({ ...endpointsOf(name), ...options });
  publishers.push(publisher);
  return publisher;
}

async function stop(publisher: KvEventPublisher): Promise<void> {
  publishers.splice(publishers.indexOf(publisher), 1);
  await publisher.close();
}

function worker(number: number, options: Partial<FollowedWorker> & { kind?: string; events?: null } = {}) {
  const name = `w${number}`;
  const { kind = 'kvtier', events = endpointsOf(name), ...rest } = options;
  const record = workerRecordSchema.parse({ name, kind, address: 'unix:/x', node: rest.node?.name ?? null, events });
  return { number, record, node: undefined, totalBlocks: 1_000, ...rest } satisfies FollowedWorker;
}

const node = (name: string): NodeRecord =>
  nodeRecordSchema.parse({ name, peer: { host: '127.0.0.1', port: 1 }, events: endpointsOf(name) });

const blocksOf = (keys: Keys, numbers: number[]): number[] => feed!.match(keys, numbers).map(({ blocks }) => blocks);
const wait = { timeout: 15_000, interval: 10 };

describe('what a worker has at hand', () => {
  it('is of a pod what its engine holds, and what all of its ranks have in the node beside it', async () => {
    const [engine, n, m] = [await publish('w0'), await publish('n'), await publish('m')];
    const prompt = promptOf(1, 8);
    const ranks = [namespace, '8899aabbccddeeff'] as const;
    const pages = ranks.map((rank) => ({ events: [stored(prompt, 0, 8, { medium: 'CPU' })], subtopic: `@${rank}` }));
    n.tellSnapshots(() => pages);
    const feed = open();
    const pod = worker(0, { kind: 'openai', node: node('n') });
    feed.follow([pod, worker(1, { kind: 'openai', events: null, node: node('m') })]);
    for (const { subtopic } of pages) m.publish([stored(prompt, 0, 1, { medium: 'DISK' })], subtopic);
    engine.publish([stored(prompt, 0, 4)]);
    for (const { events, subtopic } of pages) n.publish(events, subtopic);
    const byMedium = (gpu: number, cpu: number) => Int32Array.of(gpu, cpu, 0, 0, 0, 0, 0, 0);
    await vi.waitFor(
      () => expect(feed.match(prompt.keys, [0])[0]).toMatchObject({ blocks: 8, byMedium: byMedium(4, 4) }),
      wait,
    );
    // The other pod's node can fetch what the first one has, as far as all ranks have it.
    const remote = () => feed.match(prompt.keys, [0, 1]).map(({ remoteBlocks }) => remoteBlocks);
    await vi.waitFor(() => expect(remote()).toEqual([0, 7]), wait);
    for (const [from, to] of [
      [1, 2],
      [6, 7],
    ] as const)
      n.publish([{ type: 'BlockRemoved', blockHashes: prompt.hashes.slice(from, to), medium: 'CPU' }], `@${ranks[1]}`);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0, 1])).toEqual([6, 1]), wait);
    expect(remote()).toEqual([0, 0]);
    // One of ours beside it says that the node names blocks as we do.
    feed.follow([pod, worker(1, { node: node('n'), namespaces: [namespace] })]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [1])).toEqual([8]), wait);
  });

  it('is what its engine, its node and the shared tiers hold, each block on its nearest medium', async () => {
    const [a, b] = [await publish('w0'), await publish('w1')];
    const [n, m] = [await publish('n'), await publish('m')];
    const feed = open();
    feed.follow([worker(0, { node: node('n') }), worker(1, { node: node('m') }), worker(2, { events: null })]);
    const prompt = promptOf(1, 10);
    a.publish([stored(prompt, 0, 2)]);
    a.publish([stored(prompt, 2, 4)]);
    b.publish([stored(prompt, 0, 1)]);
    const tier = { parentBlockHash: null, tokenIds: [], blockSize: 0 };
    n.publish([stored(prompt, 0, 6, { ...tier, medium: 'CPU' })], `@${namespace}`);
    n.publish([stored(prompt, 6, 8, { ...tier, medium: 'DISK' })], `@${namespace}`);
    // Both nodes tell of the shared tier, and of their peers' blocks, which are told by those.
    for (const one of [n, m]) {
      one.publish([stored(prompt, 8, 9, { ...tier, medium: 'S3' })], `@${namespace}`);
      one.publish([stored(prompt, 9, 10, { ...tier, medium: 'PEER' })], `@${namespace}`);
    }
    const remote = { remoteMedium: 3 };
    await vi.waitFor(() => {
      expect(feed.match(prompt.keys, [0, 1, 2, 9])).toEqual([
        { blocks: 9, byMedium: Int32Array.of(4, 2, 2, 0, 0, 1, 0, 0), remoteBlocks: 0, ...remote },
        { blocks: 1, byMedium: Int32Array.of(1, 0, 0, 0, 0, 0, 0, 0), remoteBlocks: 7, ...remote },
        { blocks: 0, byMedium: new Int32Array(8), remoteBlocks: 0, ...remote },
        { blocks: 0, byMedium: new Int32Array(8), remoteBlocks: 0, ...remote },
      ]);
    }, wait);
    expect(feed.elsewhere(prompt.keys)).toEqual({ blocks: 9, medium: 5 });
    // Another model's blocks on the same node are not ours.
    feed.follow([worker(0, { node: node('n'), namespaces: ['ffffffffffffffff'] }), worker(1)]);
    expect(blocksOf(prompt.keys, [0, 1])).toEqual([4, 1]);
  });
});

describe('a node whose record changes', () => {
  it('keeps what it told, and is heard anew only where it publishes elsewhere', async () => {
    const subscribe = vi.fn(subscribeWith({ curve: undefined, trustedNetwork: false }));
    const feed = open({ subscribe });
    const prompt = promptOf(16, 4);
    const [n, moved] = [await publish('n'), await publish('moved')];
    const other: NodeRecord = { ...node('m'), events: null };
    const follow = (record: NodeRecord): void =>
      feed.follow([record, other].map((its, i) => worker(i, { events: null, node: its, namespaces: [namespace] })));
    const found = () => ({
      held: feed.match(prompt.keys, [0, 1]).map(({ blocks, remoteBlocks }) => [blocks, remoteBlocks]),
      subscribed: subscribe.mock.calls.map(([{ endpoint }]) => endpoint),
    });
    follow(node('n'));
    n.publish([stored(prompt, 0, 4, { medium: 'CPU' })], `@${namespace}`);
    const [first, second] = ['n', 'moved'].map((name) => endpointsOf(name).endpoint);
    const told = {
      held: [
        [4, 0],
        [0, 4],
      ],
      subscribed: [first],
    };
    await vi.waitFor(() => expect(found()).toEqual(told), wait);
    // Other nodes come and go: whom it fetches from says nothing of what it holds.
    follow({ ...node('n'), peers: ['x'] });
    expect(found()).toEqual(told);
    // What it holds stays; nobody can fetch it any more.
    follow({ ...node('n'), peer: null });
    expect(found()).toEqual({
      held: [
        [4, 0],
        [0, 0],
      ],
      subscribed: [first],
    });
    follow({ ...node('n'), events: { ...node('moved').events! } });
    expect(found()).toEqual({
      held: [
        [0, 0],
        [0, 0],
      ],
      subscribed: [first, second],
    });
    moved.publish([stored(prompt, 0, 3, { medium: 'CPU' })], `@${namespace}`);
    await vi.waitFor(
      () =>
        expect(found().held).toEqual([
          [3, 0],
          [0, 3],
        ]),
      wait,
    );
  });
});

describe('of shared tiers', () => {
  it('another node is believed when the one that was is heard no more, though it is listed', async () => {
    const prompt = promptOf(11, 3);
    const tier = { parentBlockHash: null, tokenIds: [], blockSize: 0, medium: 'S3' };
    const [n, m] = [await publish('n'), await publish('m')];
    const held = new Set<number>(); // m tells nothing before n does
    const tell = (at: number): KvEvent => stored(prompt, at, at + 1, tier);
    m.tellSnapshots(() => [{ events: [...held].map(tell), subtopic: `@${namespace}` }]);
    const feed = open();
    feed.follow([worker(0, { node: node('n') }), worker(1, { node: node('m') })]);
    n.publish([tell(0), tell(1)], `@${namespace}`);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0])).toEqual([2]), wait);
    for (const at of [0, 1]) held.add(at);
    m.publish([tell(0), tell(1)], `@${namespace}`);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0, 1])).toEqual([2, 2]), wait);
    await stop(n);
    held.delete(1);
    m.publish([{ type: 'BlockRemoved', blockHashes: [prompt.hashes[1]!], medium: 'S3' }], `@${namespace}`);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0, 1])).toEqual([0, 1]), wait);
    for (const at of [1, 2]) held.add(at);
    m.publish([tell(1), tell(2)], `@${namespace}`);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [1])).toEqual([3]), wait);
    // Who is back has the tier at hand, by what the other one tells.
    const again = await publish('n');
    again.publish([tell(0)], `@${namespace}`);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0, 1])).toEqual([3, 3]), wait);
  });
});

describe('a router that comes late', () => {
  it('learns all that engine and node hold, although they say nothing any more', async () => {
    const prompt = promptOf(2, 6);
    const tier = { parentBlockHash: null, tokenIds: [], blockSize: 0, medium: 'CPU' };
    const a = await publish('w0', { bufferSteps: 1 });
    const n = await publish('n', { bufferSteps: 1 });
    a.tellSnapshots(() => [[stored(prompt, 0, 3, { blockSize: 0, tokenIds: [] })]]);
    n.tellSnapshots(() => [{ events: [stored(prompt, 3, 6, tier)], subtopic: `@${namespace}` }]);
    for (let i = 0; i < 3; i++) {
      a.publish([stored(prompt, i, i + 1)]);
      n.publish([stored(prompt, 3 + i, 4 + i, tier)], `@${namespace}`);
    }
    open().follow([worker(0, { node: node('n') })]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0])).toEqual([6]), wait);
    expect(feed!.state()).toMatchObject({
      totals: { breaks: { snapshots: 2 } },
      workers: [{ name: 'w0', why: undefined }],
    });
  });

  it('relies at once on an engine that holds nothing and says so', async () => {
    (await publish('w0')).tellSnapshots(() => []);
    open().follow([worker(0)]);
    await vi.waitFor(() => expect(feed!.state().workers[0]!.why).toBeUndefined(), wait);
  });

  it('of an engine that cannot tell, learns what can be replayed', async () => {
    const prompt = promptOf(3, 4);
    const a = await publish('w0');
    a.publish([stored(prompt, 0, 3)]);
    open().follow([worker(0)]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0])).toEqual([3]), wait);
  });
});

const guessed = 'what it holds is guessed from what it was sent';

describe('where events cannot be relied on', () => {
  it('says what can be done about it', async () => {
    const feed = open();
    const unread = { what: 'its KV events are not read', remedy: 'name it' };
    const b = await publish('w1');
    const { replayEndpoint: _, ...events } = endpointsOf('w1');
    const mute = worker(1);
    const record = { ...mute.record, events: { ...mute.record.events!, ...events, replayEndpoint: null } };
    feed.follow([worker(0, { unread }), { ...mute, record }]);
    expect(feed.state().workers[0]!.why).toBe('its KV events are not read: name it');
    expect(warnings).toEqual([`worker w0: its KV events are not read; ${guessed}; name it`]);
    await vi.waitFor(
      () =>
        expect(feed.state().workers[1]!.why).toBe(
          'no KV event of it has come: name its replayEndpoint, or await its next event',
        ),
      wait,
    );
    const prompt = promptOf(9, 2);
    b.publish([stored(prompt)]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [1])).toEqual([2]), wait);
    // From then on they are: what it says is asked for anew.
    const a = await publish('w0');
    feed.follow([worker(0), { ...mute, record }]);
    a.publish([stored(prompt)]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0, 1])).toEqual([2, 2]), wait);
  });

  it('what a worker was sent stands for what it holds, as much as it can hold, for a while; in one line each way', async () => {
    let now = 1_000;
    const feed = open({ now: () => now, guessMs: 60_000 });
    feed.follow([worker(0, { events: null, totalBlocks: 20 }), worker(1)]);
    const [first, second, third] = [4, 5, 6].map((seed) => promptOf(seed, 8));
    feed.sent(0, first!.keys);
    feed.sent(1, first!.keys);
    expect(blocksOf(first!.keys, [0, 1])).toEqual([8, 8]);
    feed.sent(0, second!.keys);
    feed.sent(0, third!.keys);
    expect([first!, second!, third!].map(({ keys }) => blocksOf(keys, [0])[0])).toEqual([0, 8, 8]);
    // Its first event: what it says counts from now on, not what it was sent.
    const b = await publish('w1');
    b.publish([stored(second!, 0, 2)]);
    await vi.waitFor(() => expect(blocksOf(second!.keys, [1])).toEqual([2]), wait);
    await vi.waitFor(() => expect(blocksOf(first!.keys, [1])).toEqual([0]), wait);
    now += 120;
    await vi.waitFor(() => expect(blocksOf(third!.keys, [0])).toEqual([0]), wait);
    await stop(b);
    await vi.waitFor(() => expect(feed.state().workers[1]!.why).toMatch(/^not connected to its KV events/), wait);
    expect(blocksOf(second!.keys, [1])).toEqual([0]);
    // A look may fall between the connection and the first event.
    const said = lines.filter(
      (line) => line.startsWith('worker w1: ') && !line.includes('no KV event of it has come yet'),
    );
    expect(said).toEqual([
      `worker w1: not connected to its KV events yet; ${guessed}`,
      'worker w1: its KV events tell what it holds',
      `worker w1: not connected to its KV events; ${guessed}; look whether it listens at ${endpointsOf('w1').endpoint}`,
    ]);
    expect(lines[0]).toBe(
      `worker w0: publishes no KV events; ${guessed}; let it, and say where in its record (\`events\`)`,
    );
  });

  it('no alarm is raised of a node that was never said to publish', () => {
    const feed = open();
    const quiet = { ...node('n'), events: null };
    feed.follow([worker(0, { node: quiet })]);
    expect([feed.state().nodes, lines.filter((line) => line.includes('cache node'))]).toEqual([[], []]);
  });

  it('is guessed of as many workers as there can be; of more, one line says that they are credited with nothing', async () => {
    let now = 1_000;
    const feed = open({ now: () => now });
    const all = Array.from({ length: 2_100 }, (_, number) => worker(number, { events: null }));
    const prompt = promptOf(10, 4);
    const short = (): string[] => warnings.filter((line) => line.includes('credited with nothing'));
    feed.follow(all.slice(0, 1_024));
    for (const number of [0, 300, 1_023]) feed.sent(number, prompt.keys);
    expect(blocksOf(prompt.keys, [0, 1, 300, 1_023])).toEqual([4, 0, 4, 4]);
    // A look of its own.
    now += 1;
    const look = vi.spyOn(Reliance.prototype, 'look');
    await vi.waitFor(() => expect(look).toHaveReturned(), wait);
    look.mockRestore();
    expect(short()).toEqual([]);
    for (let i = 0; i < 2; i++) feed.follow(all);
    feed.sent(2_099, prompt.keys);
    expect(blocksOf(prompt.keys, [0, 2_099])).toEqual([4, 0]);
    const room = '4096 publishers are told apart, and no more can be; let more workers publish KV events';
    expect(short()).toEqual([`52 workers are credited with nothing: ${room}`]);
    // Room that comes is theirs.
    feed.follow(all.slice(100));
    feed.sent(2_099, prompt.keys);
    expect(blocksOf(prompt.keys, [0, 2_099])).toEqual([0, 4]);
  });

  it('is over in its time', async () => {
    let now = 1_000;
    const feed = open({ now: () => now, guessMs: 60_000 });
    const numbers = Array.from({ length: 50 }, (_, number) => number);
    feed.follow(numbers.map((number) => worker(number, { events: null })));
    const [prompt, later] = [promptOf(14, 2), promptOf(15, 2)];
    for (const number of numbers) feed.sent(number, prompt.keys);
    now += 30;
    for (const number of numbers) feed.sent(number, later.keys);
    expect(new Set(blocksOf(prompt.keys, numbers))).toEqual(new Set([2]));
    now += 30;
    // Nobody is sent anything more.
    await vi.waitFor(() => expect(new Set(blocksOf(prompt.keys, numbers))).toEqual(new Set([0])), wait);
    expect(new Set(blocksOf(later.keys, numbers))).toEqual(new Set([2]));
  });

  it('is not thought of one that is sent what it holds, and so has nothing to tell; of one that is sent what it does not', async () => {
    let now = 1_000;
    const a = await publish('w0');
    const feed = open({ now: () => now });
    const [held, other] = [promptOf(12, 4), promptOf(13, 4)];
    const why = (): string | undefined => {
      feed.follow([worker(0)]); // looks at once
      return feed.state().workers[0]!.why;
    };
    why();
    a.publish([stored(held)]);
    await vi.waitFor(() => expect([blocksOf(held.keys, [0]), why()]).toEqual([[4], undefined]), wait);
    now += 1;
    for (let i = 0; i < 20; i++) feed.sent(0, held.keys);
    now += 11;
    expect(why()).toBeUndefined();
    for (let i = 0; i < 8; i++) feed.sent(0, i % 2 === 0 ? other.keys : promptOf(12, 5).keys);
    now += 11;
    expect(why()).toMatch(/^no KV event although it was sent 8 requests/);
  });

  it('a worker that starts again, or leaves, holds nothing of what it said', async () => {
    const prompt = promptOf(7, 4);
    const a = await publish('w0');
    a.publish([stored(prompt)]);
    const feed = open();
    feed.follow([worker(0, { bootEpoch: 'a' })]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0])).toEqual([4]), wait);
    await stop(a);
    const again = await publish('w0');
    feed.follow([worker(0, { bootEpoch: 'b' })]);
    expect(blocksOf(prompt.keys, [0])).toEqual([0]);
    again.publish([stored(prompt, 0, 1)]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0])).toEqual([1]), wait);
    feed.follow([]);
    expect(blocksOf(prompt.keys, [0])).toEqual([0]);
  });

  it('is a warning when it lasts for 5 s after the start, or when a connection that stood is lost', async () => {
    let now = 1_000;
    const feed = open({ now: () => now });
    const [late, lost] = ['cache node n', 'worker w0'] as const;
    const b = await publish('w0');
    feed.follow([worker(0, { node: node('n') })]);
    b.publish([stored(promptOf(9, 1))]);
    await vi.waitFor(() => expect(feed.state().workers[0]!.why).toBeUndefined(), wait);
    now += 4.9;
    feed.follow([worker(0, { node: node('n') })]); // looks at once
    expect(lines.filter((line) => line.startsWith(late))).toEqual([
      `${late}: not connected to its KV events yet; nothing of it is counted`,
    ]);
    expect(warnings).toEqual([]);
    now += 0.2;
    for (let i = 0; i < 2; i++) feed.follow([worker(0, { node: node('n') })]);
    const look = (name: string): string => `look whether it listens at ${endpointsOf(name).endpoint}`;
    expect(warnings).toEqual([
      `${late}: not connected to its KV events for 5 s; nothing of it is counted; ${look('n')}`,
    ]);
    await stop(b);
    await vi.waitFor(() => expect(warnings).toHaveLength(2), wait);
    expect(warnings[1]).toBe(`${lost}: not connected to its KV events; ${guessed}; ${look('w0')}`);
  });

  it('what an endpoint cannot be is said, and tried again; others are followed', async () => {
    const prompt = promptOf(8, 2);
    const b = await publish('w1');
    const feed = open();
    const bad = worker(0);
    feed.follow([
      { ...bad, record: { ...bad.record, events: { endpoint: 'nonsense', replayEndpoint: null, topic: '' } } },
      worker(1),
    ]);
    b.publish([stored(prompt)]);
    await vi.waitFor(() => expect(blocksOf(prompt.keys, [0, 1])).toEqual([0, 2]), wait);
    expect(feed.state().workers[0]!.why).toMatch(/^nonsense: cannot be subscribed to/);
  });
});
