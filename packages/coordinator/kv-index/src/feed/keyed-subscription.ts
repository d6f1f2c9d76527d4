/**
 * One publisher read with CURVE keys, which may be renewed. A connection that stands stays. One that does not stand ends when the keys
 * that it was begun with are not those of now, or after a while, as the publisher may have another one; whoever follows it then
 * subscribes anew.
 */
import type { CurveClientKeys } from '@kvtier/config';
import { type CurveClient, KvEventSubscriber, type KvEventSubscriberOptions } from '@kvtier/events';
import type { Subscription } from './followed-stream.ts';

export interface KeyedSubscriptionOptions {
  readonly at: Omit<KvEventSubscriberOptions, 'curve'>;
  /** Ours, of now. */
  readonly curve: CurveClientKeys;
  /** The publisher's is one of these. */
  readonly serverKeys: () => readonly string[];
  /** Which of them it is begun with, after the last one the first again. */
  readonly turn: number;
}

const lookMs = 250;
/** What a connection with the right key takes at most, as a rule. */
const tryMs = 2_000;
/** ZeroMQ does not try again where the publisher refused our key, which it may know by now. */
const refusedMs = 10_000;

export class KeyedSubscription implements Subscription {
  readonly #subscriber: KvEventSubscriber;
  readonly #options: KeyedSubscriptionOptions;
  readonly #serverKey: string;
  readonly #ownKey: string;
  readonly #timer: NodeJS.Timeout;
  #awayMs = 0;

  constructor(options: KeyedSubscriptionOptions) {
    const { at, curve, serverKeys, turn } = options;
    this.#options = options;
    const keys = serverKeys();
    const serverKey = keys[turn % keys.length]!;
    this.#serverKey = serverKey;
    this.#ownKey = curve.publicKey;
    // What is lost is asked for by connections of its own, with our keys of then.
    const client: CurveClient = {
      serverKey,
      get publicKey() {
        return curve.publicKey;
      },
      get secretKey() {
        return curve.secretKey;
      },
    };
    this.#subscriber = new KvEventSubscriber({ ...at, curve: client });
    this.#timer = setInterval(() => this.#look(), lookMs).unref();
  }

  get connected(): boolean {
    return this.#subscriber.connected;
  }

  packed(options: { readonly tokens?: boolean }): ReturnType<Subscription['packed']> {
    return this.#subscriber.packed(options);
  }

  resync(): void {
    this.#subscriber.resync();
  }

  stats(): ReturnType<Subscription['stats']> {
    return this.#subscriber.stats();
  }

  close(): void {
    clearInterval(this.#timer);
    this.#subscriber.close();
  }

  #look(): void {
    this.#awayMs = this.#subscriber.connected ? 0 : this.#awayMs + lookMs;
    if (this.#awayMs === 0) return;
    const { curve, serverKeys } = this.#options;
    const keys = serverKeys();
    const isStale = curve.publicKey !== this.#ownKey || !keys.includes(this.#serverKey);
    if (isStale || this.#awayMs >= (keys.length > 1 ? tryMs : refusedMs)) this.close();
  }
}
