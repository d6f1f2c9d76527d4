/** A connection that stands and brings nothing any more: a real publisher behind a relay that swallows what goes through it. */
import { once } from 'node:events';
import { type AddressInfo, connect, createServer, type Socket } from 'node:net';
import { afterEach, expect, it, vi } from 'vitest';
import type { KvEvent } from './event.ts';
import { KvEventPublisher } from './publisher.ts';
import { KvEventSubscriber, type KvEventSubscriberOptions } from './subscriber.ts';

const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

const limit = { timeout: 20_000, interval: 10 };
const event = (hash: number): KvEvent => ({ type: 'BlockRemoved', blockHashes: [BigInt(hash)], medium: 'GPU' });

/** `swallow`: of the connections of now, from now on. */
async function relayTo(endpoint: string) {
  const port = Number(endpoint.split(':').at(-1));
  const pairs: [Socket, Socket][] = [];
  const server = createServer((near) => {
    const far = connect({ host: '127.0.0.1', port });
    for (const socket of [near, far]) socket.on('error', () => undefined);
    near.pipe(far).pipe(near);
    pairs.push([near, far]);
  }).listen(0, '127.0.0.1');
  await once(server, 'listening');
  ends.push(() => {
    server.close();
    for (const socket of pairs.flat()) socket.destroy();
  });
  const swallow = (): void => {
    for (const [near, far] of pairs) for (const socket of [near, far]) socket.unpipe().resume();
  };
  return { endpoint: `tcp://127.0.0.1:${(server.address() as AddressInfo).port}`, pairs, swallow };
}

async function behindRelay(options: Partial<KvEventSubscriberOptions>) {
  const at = 'tcp://127.0.0.1:*';
  const publisher = await KvEventPublisher.start({ endpoint: at, replayEndpoint: at, topic: 'kv' });
  ends.push(() => publisher.close());
  const relay = await relayTo(publisher.endpoint);
  const { endpoint } = relay;
  const subscriber = new KvEventSubscriber({ endpoint, replayEndpoint: publisher.replayEndpoint, ...options });
  const said: (number | string)[] = [];
  const ended = (async () => {
    for await (const item of subscriber) said.push(item.kind === 'batch' ? item.seq : item.kind);
  })();
  ends.push(async () => {
    subscriber.close();
    await ended;
  });
  let published = 0;
  const publish = (): void => publisher.publish([event(published++)]);
  /** Publishes until one has come by the connection. */
  const hears = (): Promise<void> => {
    const { batches, replayed } = subscriber.stats();
    return vi.waitFor(() => {
      publish();
      const now = subscriber.stats();
      expect(now.batches - now.replayed).toBeGreaterThan(batches - replayed);
    }, limit);
  };
  return { relay, subscriber, said, publish, hears };
}

it('is made anew where the replays tell that it misses everything; nothing is lost, and nothing else changes', async () => {
  const { relay, subscriber, said, publish, hears } = await behindRelay({ heartbeatMs: 60_000 });
  await hears();
  relay.swallow();
  await vi.waitFor(() => {
    publish();
    expect(subscriber.stats().reconnects).toBe(1);
  }, limit);
  await hears();
  const { batches } = subscriber.stats();
  expect(said).toEqual(Array.from({ length: said.length }, (_, i) => i));
  expect([relay.pairs.length, said.length >= batches]).toEqual([2, true]);
  expect(subscriber.stats()).toMatchObject({ reconnects: 1, gaps: 0, restarts: 0 });
}, 60_000);

it('is made anew where the host at its other end answers to nothing, also of a publisher that cannot replay', async () => {
  const { relay, subscriber, said, hears } = await behindRelay({ replayEndpoint: null, heartbeatMs: 100 });
  await hears();
  // Quiet is not dead: ZeroMQ answers for the publisher.
  await new Promise((resolve) => setTimeout(resolve, 600));
  expect([subscriber.stats().disconnects, relay.pairs.length]).toEqual([0, 1]);
  const { length } = said;
  relay.swallow();
  await vi.waitFor(() => expect([subscriber.stats().disconnects, subscriber.connected]).toEqual([1, true]), limit);
  await hears();
  // It cannot show what it said meanwhile.
  expect(said.slice(length).filter((one) => typeof one === 'string')).toEqual(['gap']);
  expect(subscriber.stats()).toMatchObject({ disconnects: 1, reconnects: 0 });
}, 60_000);
