/**
 * Pauses between attempts to connect to a master, cut short by the news of a failover. When a Sentinel tells of another master, ioredis
 * ends the connection that it has and then waits out a pause that has grown since the master went; where it is pausing already the news
 * changes nothing. Invariant: who is told tries again within `soonMs`, and its pauses grow anew from there, since the first Sentinel to
 * tell is ahead of the others. Who is told nothing pauses longer and longer, up to the limit.
 */
import type { ConnectionOptions } from 'node:tls';
import { type Redis, SentinelConnector } from 'ioredis';
import { type Listing, type Place, placeOf, SentinelList } from './sentinel-list.ts';
import { Votes } from './votes.ts';

/** The clients of a master are many and are told at the same time. */
const soonMs = 50;

export class Pauses {
  readonly #maxMs: number;
  /** ioredis counts attempts since it was connected last. */
  #attempts = 0;
  /** Of these, before the news. */
  #before = 0;
  #isTold = false;

  constructor(maxMs: number) {
    this.#maxMs = maxMs;
  }

  /** ms until the next attempt. */
  readonly next = (attempts: number): number => {
    if (attempts <= this.#attempts) this.#before = 0;
    this.#attempts = attempts;
    if (this.#isTold) {
      this.#isTold = false;
      this.#before = attempts;
      return Math.random() * soonMs;
    }
    return backoffMs(attempts - this.#before, this.#maxMs);
  };

  /** Before the connection ends, or while there is none. */
  told(isPausing: boolean): void {
    if (isPausing) this.#before = this.#attempts;
    else this.#isTold = true;
  }
}

/**
 * Of Sentinels: the first of a round. ioredis goes on where it was in their list when it connects again, so that a round may end with
 * none asked.
 */
export const nextRoundMs = (round: number, maxMs: number): number => (round === 1 ? 10 : backoffMs(round - 1, maxMs));

/** Of a Sentinel that is gone, perhaps for good: by each of all clients, so less often than a master is tried. Two seconds are the most. */
export const listenAgainMs = (times: number, maxMs: number): number => backoffMs(times, 0.8 * Math.max(maxMs, 2_000));

export function backoffMs(times: number, maxMs: number): number {
  return Math.min(maxMs, 50 * 2 ** Math.min(times, 6)) * (0.75 + Math.random() / 2);
}

type Master = Place | null;

/** What ioredis keeps to itself; without one of these the news comes as ioredis alone brings it, and failover-news.test.ts fails. */
interface Inner extends Listing {
  readonly options: {
    readonly connectTimeout: number;
    /** The master's. */
    readonly name: string;
    readonly sentinelTLS?: ConnectionOptions;
  };
  failoverDetector?: { readonly sentinels: readonly object[]; isDisconnected: boolean; disconnect(): void } | null;
  resolve(sentinel: Place): Promise<Master>;
  /** `options`: of a subscription to news. */
  connectToSentinel(sentinel: Place, options?: object): Redis;
  initFailoverDetector(): Promise<void>;
}

/**
 * For `Connector` of ioredis's options: `told` when it ends a connection because a Sentinel told of another master; `resolved` with the
 * host, as the Sentinels have it, of the one that it connects to next.
 */
export const tellingConnector = (
  told: () => void,
  resolved: (host: string) => void,
): (new (
  options: unknown,
) => SentinelConnector) =>
  class extends SentinelConnector {
    constructor(options: unknown) {
      super(options as ConstructorParameters<typeof SentinelConnector>[0]);
      hearAll(this as unknown as Inner, resolved);
    }

    override disconnect(): void {
      // It is called for every end; the detector notes first when the end is its own.
      const isTold = (this as unknown as Inner).failoverDetector?.isDisconnected === true;
      super.disconnect();
      if (isTold) told();
    }
  };

/**
 * ioredis believes the first Sentinel that answers, one an attempt, though another knows more: who lost a master, or did not reach it, and
 * is sent there again asks all the others. And it asks, connects, and only then listens for news: what is told in between it never hears,
 * nor what is told while a Sentinel starts anew, and a master that stands still takes its whole time limit. So each Sentinel is asked
 * whenever we have begun to listen to it.
 */
function hearAll(connector: Inner, resolved: (host: string) => void): void {
  const { resolve, initFailoverDetector, connectToSentinel } = connector;
  /** What each Sentinel said last. */
  const said = new Map<string, string>();
  const list = new SentinelList(connector, (gone) => said.delete(gone));
  const ask = async (sentinel: Place): Promise<Master> => {
    const master = await resolve.call(connector, sentinel).catch((error: unknown) => {
      list.failed(sentinel);
      throw error;
    });
    if (master !== null) said.set(placeOf(sentinel), placeOf(master));
    return master;
  };
  /** Of the last attempt. */
  let place: string | undefined;
  /** The first of them that names another master than the last attempt had. */
  const another = (sentinels: readonly Place[]): Promise<Master> =>
    Promise.any(
      sentinels.map(async (sentinel) => {
        const master = await ask(sentinel);
        if (master === null || placeOf(master) === place) throw new Error('nothing else');
        return master;
      }),
    ).catch(() => null);
  connector.resolve = async (sentinel) => {
    let master = await ask(sentinel);
    if (master !== null && placeOf(master) === place) {
      const others = connector.sentinelIterator.sentinels.filter((other) => other !== sentinel);
      master = (await another(others)) ?? master;
    }
    place = master === null ? undefined : placeOf(master);
    if (master !== null) resolved(master.host);
    return master;
  };
  let listening: (sentinel: Place, wasAway: boolean) => void = () => {};
  let leaving: (sentinel: Place) => void = () => {};
  connector.connectToSentinel = (sentinel, options) => {
    if (options === undefined) return connectToSentinel.call(connector, sentinel);
    // It subscribes when the Sentinel is there, however late that is.
    const lasting = { ...options, maxRetriesPerRequest: null, commandTimeout: undefined };
    const client = connectToSentinel.call(connector, sentinel, lasting);
    client.on('error', () => {}); // it connects again
    let wasAway = false;
    const left = leaving;
    client.on('reconnecting', () => {
      wasAway = true;
      list.failed(sentinel);
      left(sentinel);
      // It has those that it began with.
      const { sentinelTLS } = connector.options;
      if (sentinelTLS !== undefined) client.options.tls = sentinelTLS;
    });
    const { on } = client;
    client.on = ((event: string, listener: (...args: string[]) => void) => {
      if (event !== 'message') return on.call(client, event, listener);
      return on.call(client, event, (channel: string, text: string) => {
        if (isNewsTo(connector.options.name, place, text)) listener(channel, text);
      });
    }) as typeof on;
    const [subscribe, subscribed] = [client.subscribe, listening];
    // The client itself calls it when it has connected again. Where it is refused, the answer is all there is.
    client.subscribe = ((...channels: string[]) => {
      const done = subscribe.call(client, ...channels);
      const ended = (): void => subscribed(sentinel, wasAway);
      done.then(ended, ended);
      return done;
    }) as typeof subscribe;
    return client;
  };
  connector.initFailoverDetector = async () => {
    const connected = place!;
    let give: (isOutvoted: boolean) => void = () => {};
    let votes = new Votes(connected, 0);
    let isOver = (): boolean => true;
    leaving = (sentinel) => votes.left(placeOf(sentinel));
    listening = async (sentinel, wasAway) => {
      if (isOver()) return;
      const name = placeOf(sentinel);
      const before = said.get(name);
      const master = await ask(sentinel).catch(() => null);
      if (master === null) return;
      give(votes.cast(name, list.identityOf(sentinel), placeOf(master), before, wasAway));
    };
    const listens = initFailoverDetector.call(connector);
    const detector = connector.failoverDetector;
    if (detector) {
      votes = new Votes(connected, detector.sentinels.length);
      isOver = () => connector.failoverDetector !== detector || detector.isDisconnected;
      give = (isOutvoted) => {
        if (isOutvoted && !isOver()) detector.disconnect();
      };
      setTimeout(() => give(votes.close()), connector.options.connectTimeout).unref();
    }
    await listens;
  };
}

/**
 * Every Sentinel tells of a failover, one after the other, and of all the masters that it knows; ioredis would end a connection that has
 * been made to the new one with each of them. `text`: the name, host and port before, host and port now.
 */
function isNewsTo(name: string, place: string | undefined, text: string): boolean {
  const words = text.split(' ');
  if (words.length !== 5) return true;
  return words[0] === name && placeOf({ host: words[3]!, port: Number(words[4]) }) !== place;
}
