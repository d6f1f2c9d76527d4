/**
 * Keeps one tier's bit in the index in step with the tier, in turns of bounded length:
 *
 *     listing ──▶ in step        the tier lists what it holds page by page; what changes meanwhile is taken in as it comes
 *        ▲           │ cleared   its bit counts for nothing from that moment on
 *        └─ going ◀──┘           it is taken out of the records, slice by slice; what the tier says meanwhile is not listened to,
 *                                and if it said anything, it is listed anew
 *
 * Invariant: the bit of a block counts only if the tier holds the block.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { type Following, followInPages, type Slices, type Tier, type TierChange } from '@kvtier/tiers';

export type Followable = Pick<Tier, 'follow' | 'followInPages'>;

/** A change of a block with a record: `held`, or not any more; `expiresS`: the end that the tier knows of its object, 0: none. */
export type OnChange = (record: number, namespace: Namespace, hash: HashKey, held: boolean, expiresS: number) => void;
/** Not a record. */
const none = -1;

/** The index, as far as one tier is concerned. */
export interface TierRecords {
  /** Returns the number of the block's record; -1: the tier was listed as a holder before. */
  set(namespace: Namespace, hash: HashKey, tiers: number): number;
  /** The number of the block's record; -1: there is none. */
  recordOf(namespace: Namespace, hash: HashKey): number;
  clear(namespace: Namespace, hash: HashKey, tiers: number): void;
  tiers(namespace: Namespace, hash: HashKey): number;
  /** The bits of these tiers count for nothing, until all records are without them; returns from where to take them out. */
  mute(tiers: number): number;
  /** A slice of that, downward; returns from where to go on, 0: they are out, and count again. */
  takeOut(tiers: number, from: number): number;
}

export interface FollowedTierEvents {
  /** Of each block once each way, while it has a record. */
  readonly onChange: OnChange;
  readonly onCleared: () => void;
}

export class FollowedTier {
  /** Its bit. */
  readonly bits: number;
  readonly #tier: Followable;
  readonly #records: TierRecords;
  readonly #slices: Slices;
  readonly #events: FollowedTierEvents;
  #following: Following;
  #isListing = true;
  /** Records from here on are without it; 0: all. */
  #goingFrom = 0;
  /** It said something while it was going. */
  #isUnheard = false;

  /** The first page is listed when this returns. */
  constructor(tier: Followable, bits: number, records: TierRecords, slices: Slices, events: FollowedTierEvents) {
    this.bits = bits;
    this.#tier = tier;
    this.#records = records;
    this.#slices = slices;
    this.#events = events;
    this.#following = followInPages(tier, this.#listener, this.#more);
    this.#more();
  }

  /** Not all that it holds is listed. */
  get isListing(): boolean {
    return this.#isListing;
  }

  end(): void {
    this.#slices.remove(this.#slice);
    this.#following.end();
  }

  readonly #listener = (change: TierChange): void => {
    if (change.kind === 'cleared') {
      this.#events.onCleared();
      this.#cleared();
    } else if (this.#goingFrom > 0) this.#isUnheard = true;
    else this.#changed(change);
  };

  readonly #more = (): void => {
    this.#isListing = true;
    if (this.#slice()) this.#slices.add(this.#slice);
  };

  readonly #slice = (): boolean => {
    if (this.#goingFrom === 0) this.#isListing = this.#following.next();
    else {
      this.#goingFrom = this.#records.takeOut(this.bits, this.#goingFrom);
      if (this.#goingFrom === 0 && this.#isUnheard) {
        this.#isListing = true;
        this.#following.end();
        this.#following = followInPages(this.#tier, this.#listener, this.#more);
      }
    }
    return this.#goingFrom > 0 || this.#isListing;
  };

  #changed({ kind, namespace, hashes, expiresS }: Exclude<TierChange, { kind: 'cleared' }>): void {
    for (const [at, hash] of hashes.entries()) {
      if (kind === 'stored') {
        const record = this.#records.set(namespace, hash, this.bits);
        if (record !== none) this.#events.onChange(record, namespace, hash, true, expiresS?.[at] ?? 0);
      } else if ((this.#records.tiers(namespace, hash) & this.bits) !== 0) {
        this.#events.onChange(this.#records.recordOf(namespace, hash), namespace, hash, false, 0);
        this.#records.clear(namespace, hash, this.bits);
      }
    }
  }

  /** The first slice is done now: a small index needs no more. The tier itself may not be asked for anything in this turn. */
  #cleared(): void {
    if (this.#goingFrom > 0) return;
    this.#isUnheard = false;
    this.#goingFrom = this.#records.takeOut(this.bits, this.#records.mute(this.bits));
    if (this.#goingFrom > 0) this.#slices.add(this.#slice);
  }
}
