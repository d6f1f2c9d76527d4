/**
 * Tells one peer what this node holds: all of it, page by page as the peer takes it, and what changes meanwhile behind that, in order.
 *
 *     tier ──page of what is held now──▶ ┐
 *     tier ──change──────────────────▶ waiting ──at most `maxUnsentBytes` unsent──▶ socket ──'drain'──▶ the next page
 *
 * Invariants: what the peer was told is what the tiers said, up to the last message; memory is bounded however many blocks there are
 * and however slowly the peer reads: where more changes than `maxWaiting` wait, they are forgotten, and all is told anew.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { followInPages } from '../kit/followers.ts';
import { type Slices, slicing } from '../kit/slices.ts';
import type { Following, Tier, TierChange } from '../kit/tier.ts';
import { type Message, maxHashes } from './frames.ts';

const maxUnsentBytes = 1 << 20;
/** In slices. */
const maxWaiting = 64;

/** The peer's end of the connection: `Control`. */
export interface Told {
  readonly socket: {
    on(event: 'drain', listener: () => void): unknown;
    off(event: 'drain', listener: () => void): unknown;
  };
  readonly ended: boolean;
  readonly unsentBytes: number;
  send(message: Message): void;
}

interface Waiting {
  readonly tier: 0 | 1;
  readonly change: TierChange['kind'];
  readonly namespace: Namespace | null;
  readonly hashes: HashKey[];
}

export class Announcer {
  readonly #control: Told;
  readonly #slices: Slices;
  readonly #tiers: readonly Tier[];
  #followings: Following[] = [];
  #waiting: Waiting[] = [];
  #waitingHashes = 0;
  /** Followings that are in step from here on; those before have more pages. */
  #listed = 0;
  #saidListed = false;
  #isDraining = false;
  /** Too much has changed: tell all anew. */
  #isOverrun = false;
  #ended = false;
  #sequence = 0;
  /** Times that all had to be told anew. */
  overruns = 0;

  constructor(control: Told, slices: Slices, arena: Tier, below: Tier | undefined) {
    this.#control = control;
    this.#slices = slices;
    this.#tiers = below === undefined ? [arena] : [arena, below];
    control.socket.on('drain', this.#onDrain);
    this.#begin();
    this.#slices.add(this.#slice);
  }

  end(): void {
    this.#ended = true;
    this.#control.socket.off('drain', this.#onDrain);
    this.#slices.remove(this.#slice);
    this.#forget();
  }

  #begin(): void {
    this.#listed = 0;
    this.#saidListed = false;
    this.#followings = this.#tiers.map((tier, at) => followInPages(tier, (change) => this.#tell(at as 0 | 1, change)));
  }

  #forget(): void {
    for (const following of this.#followings.splice(0)) following.end();
    this.#waiting = [];
    this.#waitingHashes = 0;
  }

  #tell(tier: 0 | 1, { kind, namespace, hashes }: TierChange): void {
    if (this.#isOverrun) return;
    let last = this.#waiting.at(-1);
    for (let from = 0; from < hashes.length || from === 0; from += maxHashes) {
      const part = hashes.slice(from, from + maxHashes);
      const joins = last?.tier === tier && last.change === kind && last.namespace?.key === namespace?.key;
      const sameSize = last?.hashes[0]?.length === part[0]?.length;
      if (last !== undefined && joins && sameSize && last.hashes.length + part.length <= maxHashes)
        last.hashes.push(...part);
      else {
        last = { tier, change: kind, namespace, hashes: [...part] };
        this.#waiting.push(last);
      }
    }
    // A message costs something, too, however few hashes it has.
    this.#waitingHashes += hashes.length + 1;
    if (this.#waitingHashes > maxWaiting * slicing.blocks) {
      this.#isOverrun = true;
      this.#waiting = [];
      this.#waitingHashes = 0;
    }
    if (!this.#isDraining) this.#slices.add(this.#slice);
  }

  readonly #onDrain = (): void => {
    this.#isDraining = false;
    if (!this.#ended) this.#slices.add(this.#slice);
  };

  readonly #slice = (): boolean => {
    if (this.#isOverrun) this.#restart();
    this.#flush();
    if (this.#isDraining) return false;
    const following = this.#followings[this.#listed];
    if (following === undefined) {
      if (!this.#saidListed) this.#control.send({ kind: 'listed' });
      this.#saidListed = true;
      return false;
    }
    if (!following.next()) this.#listed++;
    this.#flush();
    return !this.#isDraining;
  };

  #restart(): void {
    this.overruns++;
    this.#forget();
    this.#isOverrun = false;
    for (const tier of this.#tiers.keys()) this.#tell(tier as 0 | 1, { kind: 'cleared', namespace: null, hashes: [] });
    this.#begin();
  }

  /** What waits, as far as the peer takes it. */
  #flush(): void {
    let sent = 0;
    for (const { hashes } of this.#waiting) {
      if (this.#control.ended || this.#control.unsentBytes >= maxUnsentBytes) break;
      const message: Message = { kind: 'change', sequence: ++this.#sequence, ...this.#waiting[sent]! };
      this.#control.send(message);
      this.#waitingHashes -= hashes.length;
      sent++;
    }
    this.#waiting.splice(0, sent);
    if (this.#waiting.length === 0) this.#waitingHashes = 0;
    this.#isDraining = this.#control.unsentBytes >= maxUnsentBytes;
  }
}
