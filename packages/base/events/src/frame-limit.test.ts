/** Whoever sends a publisher more than any request or subscription has is cut off, and the others are served. */
import { afterEach, expect, it, vi } from 'vitest';
import { curveKeyPair, Dealer, Subscriber } from 'zeromq';
import { KvEventPublisher } from './publisher.ts';
import { requestReplay } from './replay-client.ts';
import { applyCurveClient, type CurveClient } from './security.ts';
import { KvEventSubscriber } from './subscriber.ts';

const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

const limit = { timeout: 20_000, interval: 10 };
const long = Buffer.alloc(1 << 20, 'x');

/** A publisher, and the keys of one who may read. */
async function start(isOpen: boolean): Promise<{ publisher: KvEventPublisher; curve: CurveClient | null }> {
  const at = 'tcp://127.0.0.1:*';
  const [server, client] = [curveKeyPair(), curveKeyPair()];
  const keys = { secretKey: server.secretKey, allowedClientKeys: [client.publicKey] };
  const publisher = await KvEventPublisher.start({ endpoint: at, replayEndpoint: at, curve: isOpen ? null : keys });
  ends.push(() => publisher.close());
  return { publisher, curve: isOpen ? null : { serverKey: server.publicKey, ...client } };
}

/** How often the other side cut it off, once connected. */
function cutOffs(socket: Dealer | Subscriber, endpoint: string, curve: CurveClient | null): () => number {
  let count = 0;
  socket.events.on('disconnect', () => count++);
  ends.push(() => socket.close());
  applyCurveClient(socket, curve);
  socket.connect(endpoint);
  return () => count;
}

it.each([
  ['open', true],
  ['with keys', false],
])('a long request, %s: the socket takes none of it, and answers others', async (_, isOpen) => {
  const { publisher, curve } = await start(isOpen);
  publisher.publish([{ type: 'AllBlocksCleared' }]);
  const replayEndpoint = publisher.replayEndpoint!;
  const dealer = new Dealer({ linger: 0 });
  const cut = cutOffs(dealer, replayEndpoint, curve);
  await dealer.send(['', long]);
  await vi.waitFor(() => expect(cut()).toBeGreaterThan(0), limit);
  const limits = { deadlineMs: 20_000, silenceMs: 20_000, maxMessageBytes: 1 << 20 };
  const { signal } = new AbortController();
  const seqs: number[] = [];
  for await (const { seq } of requestReplay({ endpoint: replayEndpoint, fromSeq: 0, ...limits, curve, signal }))
    seqs.push(seq);
  expect([seqs, publisher.stats().replays]).toEqual([[0], 1]);
});

it.each([
  ['open', true],
  ['with keys', false],
])('a long subscription, %s: the socket takes none of it, and others hear', async (_, isOpen) => {
  const { publisher, curve } = await start(isOpen);
  const subscriber = new Subscriber({ linger: 0 });
  const cut = cutOffs(subscriber, publisher.endpoint, curve);
  subscriber.subscribe(long);
  await vi.waitFor(() => expect(cut()).toBeGreaterThan(0), limit);
  const { endpoint, replayEndpoint } = publisher;
  const topic = 'k'.repeat(255);
  const good = new KvEventSubscriber({ endpoint, replayEndpoint, curve });
  const named = new Subscriber({ linger: 0 });
  const namedCut = cutOffs(named, endpoint, curve);
  named.subscribe(topic);
  let isHeard = false;
  const ended = (async () => {
    for await (const item of good) isHeard ||= item.kind === 'batch';
  })();
  ends.push(async () => {
    good.close();
    await ended;
  });
  await vi.waitFor(() => {
    publisher.publish([{ type: 'AllBlocksCleared' }], topic);
    expect(isHeard).toBe(true);
  }, limit);
  expect((await named.receive())[0]!.toString()).toBe(topic);
  expect(namedCut()).toBe(0);
});
