/**
 * Pauses between attempts to connect to a master, cut short by the news of a failover. When a Sentinel tells of another master, ioredis
 * ends the connection that it has and then waits out a pause that has grown since the master went; where it is pausing already the news
 * changes nothing. Invariant: who is told tries again within `soonMs`, and its pauses grow anew from there, since the first Sentinel to
 * tell is ahead of the others. Who is told nothing pauses longer and longer, up to the limit.
 */
import { SentinelConnector } from 'ioredis';

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

export function backoffMs(times: number, maxMs: number): number {
  return Math.min(maxMs, 50 * 2 ** Math.min(times, 6)) * (0.75 + Math.random() / 2);
}

type Master = { readonly host: string; readonly port: number } | null;

/** What ioredis keeps to itself; without one of these the news comes as ioredis alone brings it, and failover-news.test.ts fails. */
interface Inner {
  sentinelIterator: { sentinels: readonly object[] };
  failoverDetector?: { isDisconnected: boolean; disconnect(): void } | null;
  resolve(sentinel: object): Promise<Master>;
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
 * and a master that stands still takes its whole time limit. So who listens asks once more.
 */
function hearAll(connector: Inner, resolved: (host: string) => void): void {
  const { resolve, initFailoverDetector } = connector;
  const ask = (sentinel: object): Promise<Master> => resolve.call(connector, sentinel);
  /** Of the last attempt. */
  let place: string | undefined;
  /** The first of them that names another master than `known`. */
  const another = (sentinels: readonly object[], known: string | undefined): Promise<Master> =>
    Promise.any(
      sentinels.map(async (sentinel) => {
        const master = await ask(sentinel);
        if (master === null || placeOf(master) === known) throw new Error('nothing else');
        return master;
      }),
    ).catch(() => null);
  connector.resolve = async (sentinel) => {
    let master = await ask(sentinel);
    if (master !== null && placeOf(master) === place) {
      const others = connector.sentinelIterator.sentinels.filter((other) => other !== sentinel);
      master = (await another(others, place)) ?? master;
    }
    place = placeOf(master);
    if (master !== null) resolved(master.host);
    return master;
  };
  connector.initFailoverDetector = async () => {
    const connected = place;
    await initFailoverDetector.call(connector);
    const detector = connector.failoverDetector;
    if (!detector || detector.isDisconnected) return;
    const isOld = (await another(connector.sentinelIterator.sentinels, connected)) !== null;
    if (isOld && connector.failoverDetector === detector && !detector.isDisconnected) detector.disconnect();
  };
}

const placeOf = (master: Master): string | undefined => (master === null ? undefined : `${master.host}:${master.port}`);
