/** Sentinels and masters of the test's own: what is told at a bad moment, and what is told while the client pauses. */
import { once } from 'node:events';
import { createServer, type Server, type Socket } from 'node:net';
import { setTimeout as sleep } from 'node:timers/promises';
import type { Redis } from 'ioredis';
import { afterEach, expect, it, vi } from 'vitest';
import { backoffMs, listenAgainMs, nextRoundMs, Pauses, tellingConnector } from './failover-news.ts';
import { RedisClient } from './index.ts';

const ends: (() => void)[] = [];
afterEach(() => {
  vi.useRealTimers();
  for (const end of ends.splice(0).reverse()) end();
});

/** Answers each command (lower case, with its arguments) by `answer`; '' is no answer. */
class Fake {
  readonly sockets = new Set<Socket>();
  port = 0;
  connections = 0;
  #server: Server | undefined;
  readonly #answer: (words: readonly string[], socket: Socket) => string;
  constructor(answer: (words: readonly string[], socket: Socket) => string) {
    this.#answer = answer;
  }

  async listen(): Promise<this> {
    this.#server = createServer((socket) => {
      this.connections++;
      this.sockets.add(socket);
      socket.on('error', () => {});
      socket.on('close', () => this.sockets.delete(socket));
      // The client writes each command at once, an array of bulk strings.
      socket.on('data', (data) => {
        const lines = data.toString().split('\r\n');
        for (let i = 0; i + 1 < lines.length; ) {
          const count = Number(lines[i]!.slice(1));
          const words = Array.from({ length: count }, (_, n) => lines[i + 2 + 2 * n]!.toLowerCase());
          socket.write(this.#answer(words, socket));
          i += 1 + 2 * count;
        }
      });
    });
    this.#server.listen(this.port, '127.0.0.1');
    await once(this.#server, 'listening');
    this.port = (this.#server.address() as { port: number }).port;
    ends.push(() => this.gone());
    return this;
  }

  gone(): void {
    this.#server?.close();
    for (const socket of this.sockets) socket.destroy();
  }
}

const bulk = (text: string): string => `$${text.length}\r\n${text}\r\n`;
const master = (): Promise<Fake> =>
  new Fake(([name]) => (name === 'info' ? bulk('role:master\r\n') : '+OK\r\n')).listen();
/** Accepts, and says nothing. */
const silent = (): Promise<Fake> => new Fake(() => '').listen();

class Sentinel extends Fake {
  readonly subscribers = new Set<Socket>();
  masterHost = '127.0.0.1';
  masterPort = 0;
  /** The other Sentinels that it knows, and those of them that it does not reach. */
  others: readonly Sentinel[] = [];
  unreached: readonly Sentinel[] = [];
  /** So often it was asked where the master is. */
  asked = 0;
  /** So often it was asked who the others are. */
  namedOthers = 0;
  onSubscribe: () => void = () => {};
  /** It accepts, and says nothing. */
  isMute = false;
  constructor() {
    super(([name, what], socket) => {
      if (this.isMute) return '';
      if (name === 'sentinel') {
        if (what !== 'sentinels') this.asked++;
        if (what !== 'sentinels') return `*2\r\n${bulk(this.masterHost)}${bulk(String(this.masterPort))}`;
        this.namedOthers++;
        const rows = this.others.map((other) => {
          const flags = this.unreached.includes(other) ? 'sentinel,disconnected' : 'sentinel';
          return `*6\r\n${['ip', '127.0.0.1', 'port', `${other.port}`, 'flags', flags].map(bulk).join('')}`;
        });
        return `*${rows.length}\r\n${rows.join('')}`;
      }
      if (name !== 'subscribe') return '+OK\r\n';
      this.onSubscribe();
      this.subscribers.add(socket);
      return `*3\r\n${bulk('subscribe')}${bulk('+switch-master')}:1\r\n`;
    });
  }

  get listeners(): number {
    return [...this.subscribers].filter(({ destroyed }) => !destroyed).length;
  }

  tell(port: number, name = 'm'): void {
    const text = `${name} 127.0.0.1 ${this.masterPort} 127.0.0.1 ${port}`;
    if (name === 'm') this.masterPort = port;
    for (const socket of this.subscribers) {
      if (!socket.destroyed) socket.write(`*3\r\n${bulk('message')}${bulk('+switch-master')}${bulk(text)}`);
    }
  }
}

function client(
  sentinels: Sentinel | readonly Sentinel[],
  timeLimitMs: number,
  onLost = (): void => {},
  host = '127.0.0.1',
): RedisClient {
  const servers = [sentinels].flat().map(({ port }) => `redis://${host}:${port}`);
  const settings = { mode: 'sentinel', servers, masterName: 'm', database: 0, timeLimitMs } as const;
  const client = new RedisClient(settings as never, onLost, 60_000);
  ends.push(() => client.close());
  return client;
}

/** Pauses of the client are as long as the test says: its clock goes by this alone, a few ms for each look. */
const holdClock = (): void => void vi.useFakeTimers({ toFake: ['performance', 'setTimeout', 'clearTimeout'] });
const until = async (holds: () => boolean, stepMs: number): Promise<void> => {
  while (!holds()) {
    await vi.advanceTimersByTimeAsync(stepMs);
    await sleep(1);
  }
};

it('whose pause has grown is connected as soon as a Sentinel tells', async () => {
  const [old, next, sentinel] = [await master(), await master(), new Sentinel()];
  await sentinel.listen();
  sentinel.masterPort = old.port;
  const redis = client(sentinel, 5_000);
  await redis.ready(5_000);
  holdClock();
  const asked = sentinel.connections;
  old.gone();
  // Refused five times: it pauses a second and more.
  await until(() => sentinel.connections >= asked + 5, 10);
  await sleep(100);
  const toldMs = performance.now();
  sentinel.tell(next.port);
  await until(() => redis.isReady, 1);
  expect(performance.now() - toldMs).toBeLessThan(500);
  expect(next.sockets.size).toBe(1);
});

it('what is told between the answer and the subscription is heard', async () => {
  const [old, next, sentinel] = [await silent(), await master(), new Sentinel()];
  await sentinel.listen();
  sentinel.masterPort = old.port;
  sentinel.onSubscribe = () => sentinel.tell(next.port);
  const redis = client(sentinel, 20_000);
  await redis.ready(10_000);
  expect([old.connections, next.sockets.size]).toEqual([1, 1]);
});

it('who lost its master asks all Sentinels, and one that knows of another is enough', async () => {
  const [old, next] = [await master(), await master()];
  const sentinels = Array.from({ length: 5 }, () => new Sentinel());
  for (const sentinel of sentinels) {
    await sentinel.listen();
    sentinel.masterPort = old.port;
  }
  const redis = client(sentinels, 5_000);
  await redis.ready(5_000);
  // Who has subscribed asks once more.
  while (!sentinels.every(({ asked }, at) => asked === (at === 0 ? 2 : 1))) await new Promise(setImmediate);
  sentinels[4]!.masterPort = next.port; // it tells nobody by itself
  holdClock();
  old.gone();
  while (redis.isReady) await new Promise(setImmediate);
  const lostMs = performance.now();
  await until(() => redis.isReady, 1);
  expect(next.sockets.size).toBe(1);
  // One pause of 100 ms; one after the other they take five, 1,500 ms together.
  expect(performance.now() - lostMs).toBeLessThan(800);
});

/** Until it holds, or the test's time is over. */
const turnsUntil = async (holds: () => boolean): Promise<void> => {
  const endMs = performance.now() + 10_000;
  while (!holds() && performance.now() < endMs) await sleep(2);
  expect(holds()).toBe(true);
};

it.each([
  ['a master that is gone, and is asked later', 'gone', 1, { lost: 0, connections: 1 }],
  ['a master that is gone, and is asked first', 'gone', 0, { lost: 1, connections: 1 }],
  ['the same by name, and is asked later', 'localhost', 1, { lost: 0, connections: 1 }],
  ['the same by name, and is asked first', 'localhost', 0, { lost: 1, connections: 2 }],
])('one of three Sentinels that names %s takes nobody the master', async (_, what, at, expected) => {
  const [real, gone] = [await master(), await master()];
  gone.gone();
  const sentinels = Array.from({ length: 3 }, () => new Sentinel());
  for (const sentinel of sentinels) {
    await sentinel.listen();
    sentinel.masterPort = real.port;
  }
  if (what === 'gone') sentinels[at]!.masterPort = gone.port;
  else sentinels[at]!.masterHost = what;
  let lost = 0;
  const redis = client(sentinels, 5_000, () => lost++);
  await turnsUntil(
    () => redis.isReady && lost === expected.lost && sentinels.every(({ listeners }) => listeners === 1),
  );
  const endMs = performance.now() + 1_000;
  let looks = 0;
  for (let ready = 0; performance.now() < endMs; expect(ready).toBe(looks)) {
    await sleep(5);
    looks++;
    if (redis.isReady) ready++;
  }
  expect({ lost, connections: real.connections }).toEqual(expected);
});

it('a Sentinel that has started anew is listened to again', async () => {
  const [old, next, sentinel] = [await master(), await master(), new Sentinel()];
  await sentinel.listen();
  sentinel.masterPort = old.port;
  const redis = client(sentinel, 5_000);
  await redis.ready(5_000);
  await turnsUntil(() => sentinel.asked === 2);
  for (const socket of sentinel.sockets) socket.destroy();
  await turnsUntil(() => sentinel.asked === 3 && sentinel.listeners === 1);
  expect([redis.isReady, old.connections]).toEqual([true, 1]);
  sentinel.tell(next.port);
  await turnsUntil(() => redis.isReady && next.sockets.size === 1);
});

it('what became of the master while its Sentinel was away is heard as soon as that is back', async () => {
  const [old, next, sentinel] = [await master(), await master(), new Sentinel()];
  await sentinel.listen();
  sentinel.masterPort = old.port;
  const redis = client(sentinel, 5_000);
  await redis.ready(5_000);
  await turnsUntil(() => sentinel.asked === 2);
  sentinel.gone();
  sentinel.masterPort = next.port; // it tells nobody by itself
  await turnsUntil(() => sentinel.sockets.size === 0);
  await sentinel.listen();
  await turnsUntil(() => redis.isReady && next.sockets.size === 1);
});

/** It is connected to `at`, whatever comes for half a second, without another connection to it. */
async function stays(redis: RedisClient, at: Fake, connections: number): Promise<void> {
  for (const endMs = performance.now() + 500; performance.now() < endMs; await sleep(2)) {
    expect([redis.isReady, at.sockets.size, at.connections]).toEqual([true, 1, connections]);
  }
}

it('of three Sentinels one that has started anew as it was before a failover, and then learns of it, takes nobody the master', async () => {
  const [old, next] = [await master(), await master()];
  const sentinels = Array.from({ length: 3 }, () => new Sentinel());
  for (const sentinel of sentinels) {
    await sentinel.listen();
    sentinel.masterPort = old.port;
  }
  let lost = 0;
  const redis = client(sentinels, 5_000, () => lost++);
  const areAsked = (): boolean => sentinels.every(({ listeners, asked }) => listeners === 1 && asked > 0);
  await turnsUntil(() => redis.isReady && areAsked());
  for (const sentinel of sentinels) sentinel.masterPort = next.port;
  for (const sentinel of sentinels) {
    sentinel.asked = 0;
    sentinel.tell(next.port);
  }
  await turnsUntil(() => redis.isReady && next.sockets.size === 1 && areAsked());
  const restarted = sentinels[1]!;
  restarted.asked = 0;
  restarted.masterPort = old.port;
  for (const socket of restarted.sockets) socket.destroy();
  await turnsUntil(areAsked);
  await stays(redis, next, 1);
  restarted.tell(next.port);
  await stays(redis, next, 1);
  expect([lost, old.connections]).toEqual([1, 1]);
});

it('of three Sentinels that were away one that is back with another master is believed, the others being dead', async () => {
  const [old, next] = [await master(), await master()];
  const sentinels = Array.from({ length: 3 }, () => new Sentinel());
  for (const sentinel of sentinels) {
    await sentinel.listen();
    sentinel.masterPort = old.port;
  }
  const redis = client(sentinels, 5_000);
  await turnsUntil(() => redis.isReady && sentinels.every(({ listeners, asked }) => listeners === 1 && asked > 0));
  for (const sentinel of sentinels) sentinel.gone();
  await turnsUntil(() => sentinels.every(({ sockets }) => sockets.size === 0));
  const [, , back] = sentinels;
  back!.masterPort = next.port;
  await back!.listen();
  await turnsUntil(() => redis.isReady && next.sockets.size === 1);
});

it('a Sentinel that is there only later, and was never heard, is enough against one', async () => {
  const [old, next] = [await master(), await master()];
  const [first, later] = [new Sentinel(), new Sentinel()];
  for (const sentinel of [first, later]) await sentinel.listen();
  [first.masterPort, later.masterPort] = [old.port, next.port];
  later.gone();
  const redis = client([first, later], 5_000);
  await turnsUntil(() => redis.isReady && first.listeners === 1 && first.asked === 2);
  await stays(redis, old, 1); // it is refused meanwhile
  await later.listen();
  await turnsUntil(() => redis.isReady && next.sockets.size === 1);
});

it('whom only a Sentinel names that has died is not listened to any more', async () => {
  const [old, next] = [await master(), await master()];
  const [first, second, third] = [new Sentinel(), new Sentinel(), new Sentinel()];
  for (const sentinel of [first, second, third]) {
    await sentinel.listen();
    sentinel.masterPort = old.port;
  }
  [first.others, second.others] = [[second], [first, third]];
  const redis = client([first, second], 5_000);
  await turnsUntil(() => redis.isReady && first.asked === 2 && second.asked === 1);
  await turnsUntil(() => second.namedOthers === 1);
  third.masterPort = next.port;
  first.tell(next.port);
  await turnsUntil(() => redis.isReady && next.sockets.size === 1 && first.asked === 4 && third.listeners === 1);
  second.isMute = true;
  const { connections } = second;
  for (const socket of second.sockets) socket.destroy();
  await turnsUntil(() => second.connections > connections); // the client has seen it, too
  third.masterPort = old.port;
  first.tell(old.port);
  await turnsUntil(() => redis.isReady && old.sockets.size === 1 && first.asked === 6);
  await stays(redis, old, 2);
  expect(third.listeners).toBe(0);
});

it('what a Sentinel tells of another master than ours ends no connection', async () => {
  const [ours, other, sentinel] = [await master(), await master(), new Sentinel()];
  await sentinel.listen();
  sentinel.masterPort = ours.port;
  const redis = client(sentinel, 5_000);
  await turnsUntil(() => redis.isReady && sentinel.listeners === 1);
  sentinel.tell(other.port, 'another');
  await stays(redis, ours, 1);
});

it('one Sentinel that is known by name and by address is no two against the others', async () => {
  const [real, gone] = [await master(), await master()];
  gone.gone();
  const [wrong, ...right] = Array.from({ length: 3 }, () => new Sentinel());
  for (const sentinel of [wrong!, ...right]) {
    await sentinel.listen();
    sentinel.masterPort = sentinel === wrong ? gone.port : real.port;
  }
  right[0]!.others = [wrong!, right[1]!];
  wrong!.others = right;
  let lost = 0;
  // Given by name, each of them; its address is what the others say.
  const redis = client([right[0]!, wrong!], 5_000, () => lost++, 'localhost');
  await turnsUntil(() => redis.isReady && wrong!.listeners === 2 && right[1]!.listeners === 1);
  await stays(redis, real, 1);
  expect(lost).toBe(0);
});

it('a Sentinel that another one does not reach is listened to on, until nobody reaches it', async () => {
  const masters = [await master(), await master(), await master(), await master()];
  const [first, second, third] = [new Sentinel(), new Sentinel(), new Sentinel()];
  const all = [first, second, third];
  for (const sentinel of all) {
    await sentinel.listen();
    sentinel.masterPort = masters[0]!.port;
    sentinel.others = all.filter((other) => other !== sentinel);
  }
  const redis = client([first, second], 5_000);
  /** The client has gone on to this one, and all that it listens to have told it whom they reach. */
  const isAt = (at: number, ...listeners: number[]): boolean =>
    redis.isReady &&
    masters[at]!.sockets.size === 1 &&
    all.every((each, i) => each.listeners === listeners[i] && each.namedOthers >= listeners[i]!);
  await turnsUntil(() => isAt(0, 1, 1, 1));
  const failOver = (at: number): void => {
    for (const sentinel of all.toReversed()) {
      sentinel.namedOthers = 0;
      if (sentinel === first) sentinel.tell(masters[at]!.port);
      else sentinel.masterPort = masters[at]!.port;
    }
  };
  first.unreached = [third];
  failOver(1);
  await turnsUntil(() => isAt(1, 1, 1, 1));
  second.unreached = [third];
  failOver(2); // as it begins to listen nobody has told it yet
  await turnsUntil(() => masters[2]!.sockets.size === 1 && second.namedOthers > 0);
  failOver(3);
  await turnsUntil(() => isAt(3, 1, 1, 0));
});

it('who listens on to a Sentinel that was away does so by the TLS settings of now', async () => {
  const [before, now] = [{ servername: 'before' }, { servername: 'now' }];
  const place = { host: '127.0.0.1', port: 1 };
  const options = { sentinels: [place], name: 'm', sentinelTLS: before };
  const connector = new (tellingConnector(
    () => {},
    () => {},
  ))(options) as unknown as { connectToSentinel(sentinel: typeof place, more: object): Redis };
  const listener = connector.connectToSentinel(place, { lazyConnect: true, retryStrategy: () => 1 });
  ends.push(() => listener.disconnect());
  expect(listener.options.tls).toBe(before);
  options.sentinelTLS = now; // as whoever renews the login writes it
  listener.connect().catch(() => {}); // nobody is there
  await new Promise<void>((resolve) => void listener.once('reconnecting', resolve));
  expect(listener.options.tls).toBe(now);
});

it('of Sentinels that were replaced none is asked any more, and those that replaced them are', async () => {
  const [old, next] = [await master(), await master()];
  const [given, replaced, replacing] = [new Sentinel(), new Sentinel(), new Sentinel()];
  for (const sentinel of [given, replaced, replacing]) {
    await sentinel.listen();
    sentinel.masterPort = old.port;
  }
  given.others = [replaced];
  replaced.others = [given];
  replacing.others = [given];
  const redis = client(given, 5_000);
  await redis.ready(5_000);
  await turnsUntil(() => given.asked === 2 && replaced.asked === 1);
  given.others = [replacing];
  given.tell(next.port);
  replacing.masterPort = next.port;
  await turnsUntil(() => redis.isReady && next.sockets.size === 1 && given.asked === 4 && replacing.asked === 1);
  expect([given, replaced, replacing].map(({ asked, listeners }) => [asked, listeners])).toEqual([
    [4, 1],
    [1, 0],
    [1, 1],
  ]);
});

it('pauses grow, begin anew at the news and at a connection, and the news makes one short', () => {
  const within = (ms: number, most: number): boolean => ms >= 0.75 * most && ms <= 1.25 * most;
  const pauses = new Pauses(1_000);
  expect([1, 2, 3, 4, 5, 6].map(pauses.next).map((ms, i) => within(ms, [100, 200, 400, 800, 1000, 1000][i]!))).toEqual(
    Array(6).fill(true),
  );
  pauses.told(false);
  expect(pauses.next(7)).toBeLessThan(50);
  expect(within(pauses.next(8), 100)).toBe(true);
  pauses.told(true);
  expect(within(pauses.next(9), 100)).toBe(true);
  expect(within(pauses.next(1), 100)).toBe(true);
  expect(within(backoffMs(9, 250), 250)).toBe(true);
  expect(nextRoundMs(1, 250)).toBe(10);
  const again = [...Array(1_000)].map(() => listenAgainMs(9, 250));
  expect([Math.min(...again) >= 1_200, Math.max(...again) <= 2_000]).toEqual([true, true]);
  expect(within(listenAgainMs(9, 10_000), 3_200)).toBe(true);
  expect(within(nextRoundMs(3, 1_000), 200)).toBe(true);
});
