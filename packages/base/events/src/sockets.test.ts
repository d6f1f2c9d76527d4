/** Publisher and subscriber over real ZeroMQ sockets, in this process. */
import { mkdtempSync, readdirSync, rmSync } from 'node:fs';
import { networkInterfaces, tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { curveKeyPair, Dealer, Subscriber } from 'zeromq';
import { decodeBatch } from './codec.ts';
import type { StreamItem } from './continuity.ts';
import type { KvEvent } from './event.ts';
import { encodeSeq, endOfReplay, snapshotRequest } from './frames.ts';
import { record } from './packed-decoder.ts';
import { KvEventPublisher, type KvEventPublisherOptions } from './publisher.ts';
import { applyCurveClient } from './security.ts';
import { KvEventSubscriber, type KvEventSubscriberOptions } from './subscriber.ts';

let folder: string;
let endpoint: string;
let replayEndpoint: string;
const ends: (() => unknown)[] = [];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-ev-'));
  endpoint = `ipc://${folder}/pub`;
  replayEndpoint = `ipc://${folder}/replay`;
});
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
  rmSync(folder, { recursive: true });
});

const event = (hash: number): KvEvent => ({ type: 'BlockRemoved', blockHashes: [BigInt(hash)], medium: 'GPU' });

async function start(options: Partial<KvEventPublisherOptions> = {}): Promise<KvEventPublisher> {
  const publisher = await KvEventPublisher.start({ endpoint, replayEndpoint, topic: 'kv', ...options });
  ends.push(() => publisher.close());
  return publisher;
}

/** A subscriber that collects: what it yielded so far, in short. */
function follow(options: Partial<KvEventSubscriberOptions> = {}) {
  const subscriber = new KvEventSubscriber({ endpoint, replayEndpoint, ...options });
  const items: StreamItem[] = [];
  const ended = (async () => {
    for await (const item of subscriber) items.push(item);
  })();
  ends.push(async () => {
    subscriber.close();
    await ended;
  });
  const said = (): (number | string)[] => items.map((item) => (item.kind === 'batch' ? item.seq : item.kind));
  return { subscriber, items, said, ended };
}

async function until(condition: () => boolean, meanwhile: () => unknown = () => undefined): Promise<void> {
  const endMs = performance.now() + 20_000;
  while (!condition()) {
    if (performance.now() > endMs) throw new Error('not within 20 s');
    meanwhile();
    await new Promise((resolve) => setTimeout(resolve, 5));
  }
}

const numbers = (count: number): number[] => Array.from({ length: count }, (_, i) => i);

it('the wire: topic, sequence number, payload; replayed as vLLM replays, with its end marker', async () => {
  const publisher = await start({ dataParallelRank: 0, now: () => 1.5 });
  const subscriber = new Subscriber({ linger: 0 });
  ends.push(() => subscriber.close());
  subscriber.connect(endpoint);
  subscriber.subscribe('kv');
  const first = subscriber.receive();
  let arrived = false;
  void first.then(() => {
    arrived = true;
  });
  await until(
    () => arrived,
    () => publisher.publish([event(7)]),
  );
  const [topic, seq, payload, ...more] = await first;
  expect(more).toEqual([]);
  expect(topic!.toString()).toBe('kv');
  const published = publisher.stats().publishedBatches;
  expect(seq!.readBigUInt64BE()).toBeLessThan(BigInt(published));
  expect(decodeBatch(payload!)).toEqual({
    ts: 1.5,
    events: [{ ...event(7), groupIdx: null, locality: null }],
    dataParallelRank: 0,
  });

  const dealer = new Dealer({ linger: 0, receiveTimeout: 20_000 });
  ends.push(() => dealer.close());
  dealer.connect(replayEndpoint);
  // What is no request gets no answer.
  await dealer.send(['', 'short']);
  await dealer.send([encodeSeq(0)]);
  await dealer.send(['', encodeSeq(0), 'more']);
  await dealer.send(['', encodeSeq(published - 1)]);
  const received = async (): Promise<string[]> => (await dealer.receive()).map((frame) => frame.toString('hex'));
  const hex = (...frames: (Buffer | string)[]): string[] => frames.map((frame) => Buffer.from(frame).toString('hex'));
  expect(await received()).toEqual(hex('', 'kv', encodeSeq(published - 1), payload!));
  expect(await received()).toEqual(hex('', '', endOfReplay, ''));
  expect(publisher.stats().replays).toBe(1);
});

it('who comes late, has a small high-water mark and reads slowly still gets everything in order', async () => {
  const publisher = await start();
  for (const i of numbers(500)) publisher.publish([event(i)]);
  const { subscriber, items, said } = follow({ hwm: 10 });
  await until(
    () => items.length > 0,
    () => publisher.publish([event(500)]),
  );
  for (const i of numbers(2_000)) publisher.publish([event(i)]);
  let { publishedBatches } = publisher.stats();
  await until(
    () => items.length >= publishedBatches,
    () => {
      publisher.publish([event(0)]); // nobody sees that the last one was lost before there is another
      publishedBatches = publisher.stats().publishedBatches;
    },
  );
  expect(said()).toEqual(numbers(items.length));
  expect(subscriber.stats()).toMatchObject({ gaps: 0, restarts: 0, batches: items.length });
});

it('what its own queue could not take is replayed, too; lost events are a gap', async () => {
  const publisher = await start({ maxQueueSize: 10 });
  for (const i of numbers(100)) publisher.publish([event(i)]);
  expect(publisher.stats().droppedBatches).toBeGreaterThanOrEqual(80);
  expect(publisher.stats()).toMatchObject({ bufferedBatches: 100, lostBatches: 0 });
  publisher.skip();
  const { items, said } = follow();
  await until(
    () => items.length > 0,
    () => publisher.publish([event(1)]),
  );
  await until(() => items.length > 101);
  expect(said().slice(0, 102)).toEqual([...numbers(100), 'gap', 101]);
  expect(items[100]).toMatchObject({ fromSeq: 100, untilSeq: 101 });
});

it('a publisher that starts again at the same place is noticed, and followed from its beginning', async () => {
  const first = await start();
  const { items, said, subscriber } = follow();
  await until(
    () => items.length > 0,
    () => first.publish([event(1)]),
  );
  const { publishedBatches } = first.stats();
  await until(() => items.length === publishedBatches);
  await first.close();
  const second = await start();
  for (const i of numbers(publishedBatches)) second.publish([event(100 + i)]);
  await until(
    () => items.length > 2 * publishedBatches + 1,
    () => second.publish([event(2)]),
  );
  const now = said();
  expect(now.slice(0, publishedBatches)).toEqual(numbers(publishedBatches));
  expect(now[publishedBatches]).toBe('restarted');
  expect(now.slice(publishedBatches + 1)).toEqual(numbers(now.length - publishedBatches - 1));
  expect(subscriber.stats()).toMatchObject({ restarts: 1, gaps: 0 });
});

it('as words: all batches in order, however many come at once, with the gap where some are lost', async () => {
  const publisher = await start();
  const subscriber = new KvEventSubscriber({ endpoint, replayEndpoint, hwm: 10 });
  const seen: (number | string)[] = [];
  const ended = (async () => {
    for await (const burst of subscriber.packed()) {
      for (const item of burst) {
        if (item.kind === 'batch') seen.push(item.seq, item.batch.words[item.batch.from + record.head]!);
        else seen.push(item.kind);
      }
    }
  })();
  ends.push(async () => {
    subscriber.close();
    await ended;
  });
  let published = 0;
  const publish = (): void => publisher.publish([event(1_000 + published++)]);
  const expected = (): (number | string)[] => numbers(published).flatMap((i) => [i, 1_000 + i]);
  await until(() => seen.length > 0, publish);
  for (let i = 0; i < 1_000; i++) publish();
  await until(() => seen.length >= 2_000, publish);
  await until(() => seen.length >= 2 * published, publish);
  expect(seen).toEqual(expected().slice(0, seen.length));
  expect(subscriber.stats()).toMatchObject({ gaps: 0, restarts: 0 });
  publisher.skip();
  await until(
    () => seen.includes('gap'),
    () => publisher.publish([event(1)]),
  );
  expect(subscriber.stats()).toMatchObject({ gaps: 1, restarts: 0 });
});

it('beyond loopback: refused without CURVE, and with it open to known keys only', async () => {
  const [server, client, stranger] = [curveKeyPair(), curveKeyPair(), curveKeyPair()];
  const curve = { secretKey: server.secretKey, allowedClientKeys: [client.publicKey] };
  const open = { endpoint: 'tcp://0.0.0.0:*', replayEndpoint: 'tcp://0.0.0.0:*' };
  await expect(start(open)).rejects.toThrow(/^endpoint tcp:\/\/0\.0\.0\.0:\*: open to the network; /);
  const publisher = await start({ ...open, curve });
  const here = (address: string | null): string => address!.replace('0.0.0.0', '127.0.0.1');
  const at = { endpoint: here(publisher.endpoint), replayEndpoint: here(publisher.replayEndpoint) };

  const outside = follow({ ...at, curve: { serverKey: server.publicKey, ...stranger } });
  await until(() => publisher.stats().refusedClients > 0);
  publisher.publish([event(1)]);
  const inside = follow({ ...at, curve: { serverKey: server.publicKey, ...client } });
  await until(
    () => inside.items.length > 1,
    () => publisher.publish([event(2)]),
  );
  expect(inside.said()).toEqual(numbers(inside.items.length)); // the first one came over the replay socket
  expect(outside.items).toEqual([]);
});

/** Of this host, as others reach it. */
const reached = Object.values(networkInterfaces())
  .flat()
  .find((each) => each !== undefined && !each.internal && each.family === 'IPv4')?.address;

it.skipIf(reached === undefined)('beyond loopback: without CURVE where the network is said to be trusted', async () => {
  const publisher = await start({ endpoint: 'tcp://*:*', replayEndpoint: 'tcp://*:*', trustedNetwork: true });
  publisher.publish([event(1)]);
  const there = (address: string | null): string => address!.replace('0.0.0.0', reached!);
  const other = follow({ endpoint: there(publisher.endpoint), replayEndpoint: there(publisher.replayEndpoint) });
  await until(
    () => other.items.length > 1,
    () => publisher.publish([event(2)]),
  );
  expect(other.said()).toEqual(numbers(other.items.length)); // the first one came over the replay socket
});

it('a key that is renewed: who has the one before is cut off, who has the new one reads on, and lists are of now', async () => {
  const [old, fresh, client, second] = [curveKeyPair(), curveKeyPair(), curveKeyPair(), curveKeyPair()];
  const now = { secretKey: old.secretKey, allowedClientKeys: [client.publicKey] };
  let renewed = (): void => {};
  let told = 0;
  const curve = {
    get secretKey() {
      return now.secretKey;
    },
    get allowedClientKeys() {
      return now.allowedClientKeys;
    },
    onRenewed: (listener: () => void) => (renewed = listener),
  };
  const publisher = await start({ curve });
  publisher.onServerKey(() => told++);
  expect(publisher.serverKey).toBe(old.publicKey);
  const before = follow({ curve: { serverKey: old.publicKey, ...client } });
  const { subscriber } = before;
  // Not by a replay: ZeroMQ leaves a connection whose handshake is still under way as it is.
  await until(
    () => subscriber.stats().batches > subscriber.stats().replayed,
    () => publisher.publish([event(1)]),
  );
  now.secretKey = fresh.secretKey;
  renewed();
  expect([publisher.serverKey, told]).toEqual([fresh.publicKey, 1]);
  // With what is published next: until then ZeroMQ's socket does nothing.
  await until(
    () => !subscriber.connected && subscriber.stats().disconnects > 0,
    () => publisher.publish([event(1)]),
  );
  const after = follow({ curve: { serverKey: fresh.publicKey, ...client } });
  const stranger = follow({ curve: { serverKey: fresh.publicKey, ...second } });
  await until(
    () => after.items.length > 1 && publisher.stats().refusedClients > 0,
    () => publisher.publish([event(2)]),
  );
  expect([after.items[0], stranger.items]).toMatchObject([{ kind: 'batch', seq: 0 }, []]); // replayed: that socket has the new key, too
  now.allowedClientKeys = [client.publicKey, second.publicKey];
  const known = follow({ curve: { serverKey: fresh.publicKey, ...second } });
  await until(
    () => known.items.length > 1,
    () => publisher.publish([event(3)]),
  );
  const { length } = before.items;
  expect(subscriber.connected).toBe(false);
  await publisher.close();
  expect([before.items.length, readdirSync(folder)]).toEqual([length, []]);
});

it('a key that is renewed while a list is given out: who asks anew, with the new one, is answered', async () => {
  const [old, fresh, client] = [curveKeyPair(), curveKeyPair(), curveKeyPair()];
  let { secretKey } = old;
  let renewed = (): void => {};
  const curve = {
    get secretKey() {
      return secretKey;
    },
    allowedClientKeys: [client.publicKey],
    onRenewed: (listener: () => void) => (renewed = listener),
  };
  const publisher = await start({ curve });
  publisher.tellSnapshots(function* () {
    if (secretKey === old.secretKey) {
      secretKey = fresh.secretKey;
      renewed(); // the socket is unbound before the first page goes
    }
    yield [event(1)];
  });
  const ask = async (serverKey: string): Promise<Dealer> => {
    const dealer = new Dealer({ linger: 0, receiveTimeout: 20_000 });
    ends.push(() => dealer.close());
    applyCurveClient(dealer, { serverKey, ...client });
    dealer.connect(replayEndpoint);
    await dealer.send(['', snapshotRequest]);
    return dealer;
  };
  await ask(old.publicKey);
  await until(() => secretKey === fresh.secretKey);
  const anew = await ask(fresh.publicKey);
  const events = async () => decodeBatch((await anew.receive())[3]!).events;
  expect([await events(), await events()]).toMatchObject([[], [event(1)]]);
  expect((await anew.receive())[2]).toEqual(endOfReplay);
  expect(publisher.stats().replays).toBe(1);
});

it.each([
  ['endpoint', { endpoint: 'tcp://*:5557' }, 'CONFIG', /open to the network/],
  ['replayEndpoint', { replayEndpoint: 'tcp://[::]:5558' }, 'CONFIG', /^replayEndpoint .*open to the network/],
  ['endpoint', { endpoint: 'udp://127.0.0.1:1' }, 'CONFIG', /not an endpoint; write ipc/],
  ['endpoint', { endpoint: 'tcp://127.0.0.1:70000' }, 'CONFIG', /not an endpoint/],
  ['endpoint', { endpoint: `ipc:///${'x'.repeat(120)}` }, 'CONFIG', /longer than 107 bytes/],
  ['endpoint', { endpoint: 'ipc:///nonexistent-folder/socket' }, 'IO', /cannot be bound/],
  ['curve', { curve: { secretKey: 'short', allowedClientKeys: [] } }, 'CONFIG', /^curve\.secretKey: not a CURVE key/],
  [
    'curve',
    { curve: { secretKey: 'x'.repeat(40), allowedClientKeys: [] } },
    'CONFIG',
    /^curve\.allowedClientKeys: empty/,
  ],
])('a wrong %s is one clear error: %j', async (_, options, code, message) => {
  await expect(start(options)).rejects.toThrow(message);
  await expect(start(options)).rejects.toMatchObject({ code });
});

it('an address in use is LOCKED; ranks have ports of their own', async () => {
  const first = await start({ endpoint: 'tcp://127.0.0.1:*', replayEndpoint: null });
  const port = Number(first.endpoint.split(':').at(-1));
  await expect(start({ endpoint: first.endpoint, replayEndpoint: null })).rejects.toMatchObject({ code: 'LOCKED' });
  const below = { endpoint: `tcp://localhost:${port - 1}`, replayEndpoint: null, dataParallelRank: 1 };
  await expect(start(below)).rejects.toMatchObject({ code: 'LOCKED', message: expect.stringContaining(`:${port}:`) });
});

it('close ends the iteration, also within a replay, and removes the sockets', async () => {
  const publisher = await start();
  expect(readdirSync(folder).sort()).toEqual(['pub', 'replay']);
  publisher.publish([event(1)]);
  // Nobody answers there: the subscriber waits for a replay of batch 0 when it is closed.
  const waiting = follow({ replayEndpoint: `ipc://${folder}/nobody`, replayDeadlineMs: 60_000 });
  const idle = follow();
  await until(
    () => idle.items.length > 0,
    () => publisher.publish([event(1)]),
  );
  for (const { subscriber, ended } of [waiting, idle]) {
    subscriber.close();
    await ended;
  }
  await publisher.close();
  publisher.publish([event(1)]);
  expect(readdirSync(folder)).toEqual([]);
});

it('what a publisher says last is heard at once, though it is gone by then', async () => {
  const publisher = await start();
  const { said, subscriber } = follow();
  let published = 0;
  const publish = (): void => publisher.publish([event(published++)]);
  // By its subscription, and not by a replay: who has only been greeted may not be known as a subscriber yet.
  await until(() => subscriber.stats().batches - subscriber.stats().replayed >= 2, publish);
  await until(() => said().length >= published);
  const before = published;
  // Nobody reads meanwhile, as where the machine has other things to do: the last batch and the end of the connection come together.
  const stand = (ms: number): unknown => Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0, ms);
  publish();
  const closed = await new Promise<Promise<void>[]>((resolve) =>
    setImmediate(() => {
      stand(30); // what is read next is the first of the two alone
      publish();
      const closing = publisher.close();
      stand(300); // it has been sent by then: what has not is dropped when the socket is closed
      resolve([closing]);
    }),
  );
  await closed[0];
  const beginMs = performance.now();
  await until(() => said().includes(before + 1));
  // Not after having asked in vain for what was missed: that takes 5 s.
  expect(performance.now() - beginMs).toBeLessThan(4_000);
  expect(said().filter((one) => typeof one === 'number')).toEqual(numbers(before + 2));
});

it('who does not answer holds up what is said by no more than its silence', async () => {
  const publisher = await start();
  const { said } = follow({ replayEndpoint: `ipc://${folder}/nobody`, replayDeadlineMs: 50 });
  await until(
    () => said().length > 0,
    () => publisher.publish([event(0)]),
  );
});
