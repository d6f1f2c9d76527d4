/** Publishers on other hosts are read with keys alone: over real ZeroMQ sockets, with right keys, wrong ones and none. */
import type { EventAccess, EventSource } from '@kvtier/config';
import { nodeRecordSchema, workerRecordSchema } from '@kvtier/config';
import { type KvEvent, KvEventPublisher } from '@kvtier/events';
import { curveKeyPair } from '@kvtier/events/testing';
import { ChainHasher, hashKeyOf } from '@kvtier/identity';
import { afterEach, describe, expect, it, vi } from 'vitest';
import { keysOfHashes } from '../keys.ts';
import type { FollowedWorker } from './followed.ts';
import { IndexFeed } from './index-feed.ts';
import { KeyedSubscription } from './keyed-subscription.ts';
import { subscribeWith } from './subscribe.ts';

const blockTokens = 16;
const packed = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }).hashBlocks(
  null,
  new Uint32Array(blockTokens),
);
const block: KvEvent = {
  ...{ type: 'BlockStored', blockHashes: [hashKeyOf(packed)], parentBlockHash: null, blockSize: blockTokens },
  ...{ tokenIds: Array<number>(blockTokens).fill(0), loraId: null, loraName: null, medium: 'GPU' },
};
const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

const [ours, its, strangers] = [curveKeyPair(), curveKeyPair(), curveKeyPair()];
const access: EventAccess = { curve: { ...ours, serverKeys: [] }, trustedNetwork: false };

async function publish(secretKey: string, allowed: string): Promise<KvEventPublisher> {
  const curve = { secretKey, allowedClientKeys: [allowed] };
  const at = { endpoint: 'tcp://127.0.0.1:*', replayEndpoint: 'tcp://127.0.0.1:*' };
  const publisher = await KvEventPublisher.start({ ...at, topic: '', curve });
  ends.push(() => publisher.close());
  publisher.publish([block]);
  return publisher;
}

const sourceOf = ({ endpoint, replayEndpoint }: KvEventPublisher, serverKey?: string): EventSource => ({
  ...{ endpoint, replayEndpoint, topic: '', ...(serverKey && { serverKey }) },
});
const worker = (number: number, events: EventSource): FollowedWorker => ({
  ...{ number, node: undefined, totalBlocks: 100 },
  record: workerRecordSchema.parse({ name: `w${number}`, address: 'unix:/x', events }),
});

it('believes who has the key that is known of it, and nobody else', { timeout: 30_000 }, async () => {
  const warnings: string[] = [];
  const logger = { info: () => {}, warn: (_: object, line: string) => void warnings.push(line) };
  const feed = new IndexFeed({ maxBytes: 8 << 20, blockTokens, access, logger });
  ends.push(() => feed.close());
  const right = await publish(its.secretKey, ours.publicKey);
  const wrong = await publish(strangers.secretKey, ours.publicKey);
  const closed = await publish(its.secretKey, strangers.publicKey);
  feed.follow([
    worker(0, sourceOf(right, its.publicKey)),
    worker(1, sourceOf(wrong, its.publicKey)),
    worker(2, sourceOf(closed, its.publicKey)),
    worker(3, { endpoint: 'tcp://192.0.2.1:5557', replayEndpoint: null, topic: '' }),
  ]);
  const held = (): number[] => feed.match(keysOfHashes(packed, 32), [0, 1, 2, 3]).map(({ blocks }) => blocks);
  const warned = (): string[] => warnings.map((line) => line.slice(0, line.indexOf(':'))).sort();
  const all = ['worker w1', 'worker w2', 'worker w3'];
  await vi.waitFor(() => expect(warned(), warnings.join('\n')).toEqual(all), { timeout: 20_000, interval: 20 });
  expect(held()).toEqual([1, 0, 0, 0]);
  expect(feed.state().workers.map(({ why }) => why)).toEqual([
    undefined,
    ...[wrong, closed].map(
      (one) =>
        `not connected to its KV events: look whether it listens at ${sourceOf(one, its.publicKey).endpoint}, and has this key`,
    ),
    'KV events: tcp://192.0.2.1:5557 is on another host and no key of its publisher is known; configure kvEvents.curve of ' +
      'the coordinator, or say "kvEvents": {"trustedNetwork": true}',
  ]);
});

it('keys that are renewed, at both ends: what stands stays, who is cut comes back', { timeout: 60_000 }, async () => {
  const [mine, fresh, its2] = [curveKeyPair(), curveKeyPair(), curveKeyPair()];
  let [own, serverKeys] = [mine, [its.publicKey]];
  let [secretKey, allowedClientKeys] = [its.secretKey, [mine.publicKey]];
  let renewed = (): void => {};
  const curve = {
    get secretKey() {
      return secretKey;
    },
    get allowedClientKeys() {
      return allowedClientKeys;
    },
    onRenewed: (listener: () => void) => (renewed = listener),
  };
  // Read beyond loopback only by the keys of the configuration: a source that names its key would be another source with another one.
  const at = { endpoint: 'tcp://0.0.0.0:*', replayEndpoint: 'tcp://0.0.0.0:*' };
  const publisher = await KvEventPublisher.start({ ...at, curve });
  ends.push(() => publisher.close());
  const events = { ...sourceOf(publisher), topic: '' };
  const here = (place: string | null): string => place!.replace('0.0.0.0', '127.0.0.1');
  const read = { ...events, endpoint: here(events.endpoint), replayEndpoint: here(events.replayEndpoint) };
  let turn = 0;
  const made: KeyedSubscription[] = [];
  const keys = {
    get publicKey() {
      return own.publicKey;
    },
    get secretKey() {
      return own.secretKey;
    },
    get serverKeys() {
      return serverKeys;
    },
  };
  const subscribe = (): KeyedSubscription => {
    made.push(new KeyedSubscription({ at: read, curve: keys, serverKeys: () => serverKeys, turn: turn++ }));
    return made.at(-1)!;
  };
  const logger = { info: () => {}, warn: () => {} };
  const feed = new IndexFeed({ maxBytes: 8 << 20, blockTokens, subscribe, logger });
  ends.push(() => feed.close());
  publisher.publish([block]);
  feed.follow([worker(0, read)]);
  const isHeld = (): boolean => feed.match(keysOfHashes(packed, 32), [0])[0]!.blocks === 1;
  const limit = { timeout: 15_000, interval: 20 };
  await vi.waitUntil(isHeld, limit);

  // Ours: the publisher lets both in, then only the new one. The connection that stands stays.
  own = fresh;
  allowedClientKeys = [fresh.publicKey];
  publisher.publish([block]);
  await new Promise((resolve) => setTimeout(resolve, 600));
  expect([made.length, made[0]!.connected, isHeld()]).toEqual([1, true, true]);

  // Its: one that is not known yet cuts the connection; the second key of the file is tried in its turn.
  secretKey = its2.secretKey;
  renewed();
  expect(publisher.serverKey).toBe(its2.publicKey);
  await vi.waitUntil(() => !made.at(-1)!.connected && !isHeld(), limit);
  serverKeys = [its.publicKey, its2.publicKey];
  await vi.waitUntil(() => made.at(-1)!.connected && isHeld(), limit);
  const { length } = made;
  // Without the old one in the file nothing changes any more.
  serverKeys = [its2.publicKey];
  await new Promise((resolve) => setTimeout(resolve, 600));
  expect([made.length, isHeld()]).toEqual([length, true]);
});

const far: EventSource = { endpoint: 'tcp://192.0.2.1:5557', replayEndpoint: null, topic: '' };
const none: EventAccess = { curve: undefined, trustedNetwork: false };
const theirs: EventAccess = { ...access, curve: { ...ours, serverKeys: [its.publicKey] } };
it.each<[what: string, source: EventSource, EventAccess, refused: boolean]>([
  ['a Unix socket needs nothing', { ...far, endpoint: 'ipc:///tmp/x' }, none, false],
  ['loopback needs nothing', { ...far, endpoint: 'tcp://localhost:5557' }, none, false],
  ['another host is refused', far, none, true],
  [
    'the address that it is reached from is no host',
    { ...far, endpoint: 'tcp://127.0.0.1:0;10.0.0.9:5557' },
    none,
    true,
  ],
  ['a name may be another host', { ...far, endpoint: 'tcp://pod:5557' }, none, true],
  [
    'only the replays on another host',
    { ...far, endpoint: 'ipc:///tmp/x', replayEndpoint: 'tcp://[fd00::1]:1' },
    none,
    true,
  ],
  ['a trusted network', far, { ...none, trustedNetwork: true }, false],
  ['keys of ours alone do not tell who it is', far, access, true],
  ['one key for all publishers', far, theirs, false],
  ['its own key', { ...far, serverKey: its.publicKey }, access, false],
  ['its key, and none of ours', { ...far, serverKey: its.publicKey }, { ...none, trustedNetwork: true }, true],
])('%s', (_what, source, its, refused) => {
  const open = (): void => subscribeWith(its)(source).close();
  if (refused) expect(open).toThrow(expect.objectContaining({ code: 'CONFIG' }));
  else open();
});

describe('on a trusted network, where a key is known of all publishers', () => {
  const trusted = { ...theirs, trustedNetwork: true };
  const isKeyed = (source: EventSource, isPod: boolean, by = trusted): boolean => {
    const subscription = subscribeWith(by)(source, isPod);
    subscription.close();
    return subscription instanceof KeyedSubscription;
  };

  it('it is that of our own publishers; a pod publishes in the clear, unless its record names its key', () => {
    expect(isKeyed(far, false)).toBe(true);
    expect(isKeyed(far, true)).toBe(false);
    expect(isKeyed({ ...far, serverKey: its.publicKey }, true)).toBe(true);
    expect(isKeyed(far, true, theirs)).toBe(true);
  });

  it('so are a pod’s engine and its node read', { timeout: 30_000 }, async () => {
    const at = { endpoint: 'tcp://0.0.0.0:*', replayEndpoint: 'tcp://0.0.0.0:*', topic: '' };
    const asked: [string, boolean | undefined][] = [];
    const feed = new IndexFeed({
      ...{ maxBytes: 8 << 20, blockTokens, logger: { info: () => {}, warn: () => {} } },
      subscribe: (events, isPod) => {
        asked.push([events.topic, isPod]);
        return subscribeWith(trusted)({ ...events, endpoint: 'ipc:///tmp/kvtier-nobody', replayEndpoint: null }, isPod);
      },
    });
    ends.push(() => feed.close());
    const node = nodeRecordSchema.parse({ name: 'n', events: { ...at, topic: 'node' } });
    const record = workerRecordSchema.parse({
      ...{ name: 'p', kind: 'openai', address: 'http://192.0.2.1:8000', node: 'n', events: { ...at, topic: 'pod' } },
    });
    feed.follow([{ number: 0, record, node, totalBlocks: 100 }]);
    await vi.waitUntil(() => asked.length >= 2, { timeout: 20_000 });
    expect(Object.fromEntries(asked)).toEqual({ pod: true, node: false });
  });
});
