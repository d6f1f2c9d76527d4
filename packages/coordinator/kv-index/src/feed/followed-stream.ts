/**
 * One publisher's events, from its socket into its listing, and whether they can be relied on. What ends the stream is tried again: an
 * endpoint that cannot be with a growing pause, other keys soon; what the publisher sends never ends it.
 */
import type { EventSource } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { KvEventSubscriberStats, PackedBatch, StreamItem } from '@kvtier/events';
import { type Clocks, EventDelay } from './event-delay.ts';
import { addBreaks, type Breaks, noBreaks } from './totals.ts';
import type { Turns } from './turns.ts';
import { Readability } from './unread.ts';

/** `KvEventSubscriber`, as far as it is used here. */
export interface Subscription {
  readonly connected: boolean;
  packed(options: { readonly tokens?: boolean }): AsyncGenerator<readonly StreamItem<PackedBatch>[]>;
  resync(): void;
  stats(): KvEventSubscriberStats;
  close(): void;
}
/** `isPod`: an engine publishes there that is none of ours. */
export type Subscribe = (events: EventSource, isPod?: boolean) => Subscription;

export interface Listing {
  apply(item: StreamItem<PackedBatch>): Generator<void, boolean>;
  forget(): boolean;
}

/** Why somebody's events do not tell what it holds. */
export interface Problem {
  /** In a few words. */
  readonly what: string;
  /** What somebody can do; undefined: `what` says it. */
  readonly remedy: string | undefined;
}

export interface FollowedStreamOptions extends Clocks {
  readonly events: EventSource;
  readonly subscribe: Subscribe;
  readonly listing: Listing;
  readonly tokens: boolean;
  readonly turns: Turns;
  /** Its sources are others than before. */
  readonly onChange: () => void;
}

/** One time may be chance, once something has come. */
const mostUnanswered = 2;
const firstPauseMs = 500;
const maxPauseMs = 30_000;
/** What was late once is late until something comes in time, or nothing for so long. */
const forgetLagS = 10;

export class FollowedStream {
  readonly #options: FollowedStreamOptions;
  #subscription: Subscription | undefined;
  /** Of subscriptions that have ended. */
  readonly #breaks = noBreaks();
  #closed = false;
  #wake: (() => void) | undefined;
  #isHeard = false;
  #wasHeard = false;
  readonly #sinceS: number;
  #heardS = Number.NEGATIVE_INFINITY;
  #problem: string | undefined;
  #lagS = 0;
  readonly #delay: EventDelay;
  readonly #readability = new Readability();

  constructor(options: FollowedStreamOptions) {
    this.#options = options;
    this.#sinceS = options.now();
    this.#delay = new EventDelay(options);
    void this.#run();
  }

  /** When the last batch came, by `now`. */
  get heardS(): number {
    return this.#heardS;
  }

  /** How much later its events come than they did at best, in seconds. */
  get lagS(): number {
    return this.#options.now() - this.#heardS > forgetLagS ? 0 : this.#lagS;
  }

  /** undefined: its events tell what it holds now. */
  get problem(): Problem | undefined {
    const { endpoint, replayEndpoint, topic, serverKey } = this.#options.events;
    if (this.#problem !== undefined) return { what: this.#problem, remedy: undefined };
    if (this.#subscription?.connected !== true) {
      const remedy = `look whether it listens at ${endpoint}${serverKey === undefined ? '' : ', and has this key'}`;
      return { what: 'not connected to its KV events', remedy };
    }
    if (this.#readability.isUnread) {
      const remedy = "look whether it speaks vLLM's encoding; a line says what is wrong";
      return { what: 'no KV event of it that tells of blocks can be read', remedy };
    }
    const { unanswered } = this.#subscription.stats();
    if (unanswered >= (this.#isHeard ? mostUnanswered : 1)) {
      const remedy = 'look whether that answers replays; of one that does not replay, name no replay endpoint or port';
      return { what: `its replay endpoint ${replayEndpoint} does not answer`, remedy };
    }
    if (this.#isHeard) return undefined;
    const remedy = replayEndpoint === null ? 'name its replayEndpoint, or await its next event' : lookAtTopic(topic);
    return { what: 'no KV event of it has come', remedy };
  }

  /** What can be done where it says nothing though it should. */
  get silenceRemedy(): string {
    return lookAtTopic(this.#options.events.topic);
  }

  /** Seconds since it was followed, while nothing of it has ever come, and nothing speaks against that it will; else undefined. */
  get joiningS(): number | undefined {
    return this.#wasHeard || this.#problem !== undefined ? undefined : this.#options.now() - this.#sinceS;
  }

  /** Of this subscription and of all before it. */
  get breaks(): Readonly<Breaks> {
    const breaks = { ...this.#breaks };
    if (this.#subscription !== undefined) addBreaks(breaks, this.#subscription.stats());
    return breaks;
  }

  resync(): void {
    this.#subscription?.resync();
  }

  close(): void {
    this.#closed = true;
    this.#wake?.();
    this.#end();
    this.#options.listing.forget();
  }

  #end(): void {
    if (this.#subscription === undefined) return;
    addBreaks(this.#breaks, this.#subscription.stats());
    this.#subscription.close();
    this.#subscription = undefined;
  }

  async #run(): Promise<void> {
    for (let pauseMs = firstPauseMs; !this.#closed; pauseMs = Math.min(2 * pauseMs, maxPauseMs)) {
      try {
        const subscription = this.#options.subscribe(this.#options.events);
        this.#subscription = subscription;
        this.#problem = undefined;
        for await (const burst of subscription.packed({ tokens: this.#options.tokens })) {
          pauseMs = firstPauseMs;
          for (const item of burst) {
            if (this.#closed) break;
            await this.#apply(item);
          }
        }
        pauseMs = firstPauseMs / 2; // it ended itself
      } catch (error) {
        this.#problem = KvError.from(error).message;
      }
      this.#end();
      if (this.#closed) return;
      this.#forget();
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, pauseMs).unref();
        this.#wake = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
  }

  async #apply(item: StreamItem<PackedBatch>): Promise<void> {
    const { listing, turns, onChange } = this.#options;
    this.#isHeard = true;
    this.#wasHeard = true;
    this.#readability.came(item);
    if (item.kind === 'batch') this.#timed(item.batch.ts);
    const work = listing.apply(item);
    let step = work.next();
    for (; step.done !== true; step = work.next()) {
      await turns.next();
      if (!this.#closed) continue;
      // All of it is forgotten: its sources may be others' by now.
      work.return(false);
      return;
    }
    if (step.value) onChange();
  }

  #forget(): void {
    this.#isHeard = false;
    this.#readability.reset();
    if (this.#options.listing.forget()) this.#options.onChange();
  }

  #timed(ts: number): void {
    this.#heardS = this.#options.now();
    this.#lagS = this.#delay.of(ts) ?? this.#lagS;
  }
}

const lookAtTopic = (topic: string): string =>
  topic === ''
    ? 'look whether it publishes'
    : `look whether it publishes, and under the topic ${JSON.stringify(topic)}`;
