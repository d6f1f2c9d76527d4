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

/** What ioredis keeps to itself; without one of these the news comes as ioredis alone brings it, and failover-news.test.ts fails. */
interface Inner {
  failoverDetector?: { isDisconnected: boolean; disconnect(): void } | null;
  resolve(sentinel: object): Promise<{ readonly host: string; readonly port: number } | null>;
  initFailoverDetector(): Promise<void>;
}

/** For `Connector` of ioredis's options: `told` when it ends a connection because a Sentinel told of another master. */
export const tellingConnector = (told: () => void): (new (options: unknown) => SentinelConnector) =>
  class extends SentinelConnector {
    constructor(options: unknown) {
      super(options as ConstructorParameters<typeof SentinelConnector>[0]);
      hearAll(this as unknown as Inner);
    }

    override disconnect(): void {
      // It is called for every end; the detector notes first when the end is its own.
      const isTold = (this as unknown as Inner).failoverDetector?.isDisconnected === true;
      super.disconnect();
      if (isTold) told();
    }
  };

/**
 * ioredis asks for the master, connects to it, and only then listens for another: what is told in between it never hears, and a master
 * that stands still takes its whole time limit. So who listens asks once more.
 */
function hearAll(connector: Inner): void {
  const { resolve, initFailoverDetector } = connector as Partial<Inner>;
  if (resolve === undefined || initFailoverDetector === undefined) return;
  let asked: object | undefined;
  let place: string | undefined;
  connector.resolve = async (sentinel) => {
    const master = await resolve.call(connector, sentinel);
    [asked, place] = [sentinel, placeOf(master)];
    return master;
  };
  connector.initFailoverDetector = async () => {
    const [sentinel, connected] = [asked, place];
    await initFailoverDetector.call(connector);
    const detector = connector.failoverDetector;
    if (sentinel === undefined || !detector || detector.isDisconnected) return;
    const master = await resolve.call(connector, sentinel).catch(() => null);
    const isOld = master !== null && placeOf(master) !== connected;
    if (isOld && connector.failoverDetector === detector && !detector.isDisconnected) detector.disconnect();
  };
}

const placeOf = (master: { readonly host: string; readonly port: number } | null): string | undefined =>
  master === null ? undefined : `${master.host}:${master.port}`;
