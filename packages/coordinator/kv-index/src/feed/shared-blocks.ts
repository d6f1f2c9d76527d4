/**
 * What lies in shared tiers (Redis, S3): one copy for the whole cluster, so one source for each namespace and medium, whoever tells of it. All nodes
 * tell the same; one of them is believed, the first that told, and the next one takes its place, from its snapshot on, when that
 * one is lost or its events cannot be relied on: then nothing is counted twice, and nothing stays that nobody watches.
 */
import { recordType } from '@kvtier/events';
import type { Keys, KvIndex } from '../kv-index.ts';
import type { PackedEvent } from './packed-events.ts';
import { Part } from './part.ts';
import { slices } from './slices.ts';

/** A node, as one who tells. */
export interface Teller {
  /** Asks it to tell all that it holds once more. */
  resync(): void;
}

/** Namespaces of all shared tiers. */
const maxParts = 256;

interface Medium {
  teller: Teller | undefined;
  /** Who told of this medium, and has not said since that it lost it. */
  readonly told: Set<Teller>;
  /** By namespace; of which something was stored last is the last one. */
  readonly parts: Map<string, Part>;
}

export class SharedBlocks {
  readonly #index: KvIndex;
  readonly #maxBlocks: number;
  readonly #media = new Map<number, Medium>();
  /** Whose events cannot be relied on now. Weak: who leaves may do so without a word. */
  readonly #doubted = new WeakSet<Teller>();
  readonly #onChange: () => void;

  constructor(index: KvIndex, maxBlocks: number, onChange: () => void) {
    this.#index = index;
    this.#maxBlocks = maxBlocks;
    this.#onChange = onChange;
  }

  /** What of a namespace is at hand for who is beside this node: of the media that the node can reach. */
  partsOf(teller: Teller, namespace: string): Part[] {
    return [...this.#media.values()].flatMap(({ told, parts }) =>
      told.has(teller) ? (parts.get(namespace) ?? []) : [],
    );
  }

  /** All that lies in shared tiers of a namespace. */
  all(namespace: string): Part[] {
    return [...this.#media.values()].flatMap(({ parts }) => parts.get(namespace) ?? []);
  }

  /** Namespaces that were told of. */
  get namespaces(): readonly string[] {
    return [...new Set([...this.#media.values()].flatMap(({ parts }) => [...parts.keys()]))];
  }

  *event(
    teller: Teller,
    namespace: string,
    number: number,
    event: Pick<PackedEvent, 'type' | 'keys'>,
  ): Generator<number, void> {
    const medium = this.#mediumOf(number);
    if (event.type === recordType.cleared) {
      this.#lose(medium, teller);
      yield 1;
      return;
    }
    if (event.type === recordType.stored && !medium.told.has(teller)) {
      medium.told.add(teller);
      medium.teller ??= teller;
      this.#review(medium);
      this.#onChange();
    }
    if (medium.teller !== teller) return;
    let part = medium.parts.get(namespace);
    if (part === undefined) {
      if (event.type === recordType.removed) return;
      this.#makeRoom(medium);
      part = new Part(this.#index, this.#maxBlocks);
      this.#onChange();
    }
    if (event.type === recordType.stored) {
      medium.parts.delete(namespace);
      medium.parts.set(namespace, part);
    }
    for (const keys of slices(event.keys)) {
      if (event.type === recordType.removed) part.removed(number, keys);
      else if (!part.stored(number, keys, 'unknown')) return;
      yield keys.length / 2;
      // Others go on meanwhile: where this node is not believed any more, the part's number may be somebody else's.
      if (medium.parts.get(namespace) !== part) return;
    }
  }

  /** Nobody knows whether these are what they are said to be. */
  doubt(keys: Keys): void {
    for (const [number, { parts }] of this.#media) for (const part of parts.values()) part.removed(number, keys);
  }

  /** What this node said is void; it goes on telling. */
  voided(teller: Teller): void {
    for (const medium of this.#media.values()) if (medium.teller === teller) this.#empty(medium);
  }

  /** Whose events can be relied on from now on, and whose cannot: what these said may be true no more, and nobody would say so. */
  judged(trusted: readonly Teller[], doubted: readonly Teller[]): void {
    for (const teller of trusted) this.#doubted.delete(teller);
    for (const teller of doubted) this.#doubted.add(teller);
    for (const medium of this.#media.values()) this.#review(medium);
  }

  /** This node tells nothing any more. */
  left(teller: Teller): void {
    for (const medium of this.#media.values()) this.#lose(medium, teller);
  }

  #lose(medium: Medium, teller: Teller): void {
    if (medium.told.delete(teller)) this.#onChange();
    if (medium.teller === teller) this.#believe(medium, this.#nextOf(medium) ?? [...medium.told][0]);
  }

  /** Another one is believed where the one that is cannot be relied on, and there is one that can. */
  #review(medium: Medium): void {
    if (medium.teller === undefined || !this.#doubted.has(medium.teller)) return;
    const next = this.#nextOf(medium);
    if (next !== undefined) this.#believe(medium, next);
  }

  #nextOf({ told }: Medium): Teller | undefined {
    return [...told].find((teller) => !this.#doubted.has(teller));
  }

  #believe(medium: Medium, teller: Teller | undefined): void {
    this.#empty(medium);
    medium.teller = teller;
    // It told of changes only since it began: now all is wanted of it.
    teller?.resync();
  }

  /** For one namespace more: the one that was silent longest goes, as of an engine that was set up otherwise. */
  #makeRoom({ parts }: Medium): void {
    const [silent] = parts;
    if (silent === undefined || parts.size < maxParts) return;
    silent[1].close();
    parts.delete(silent[0]);
  }

  #empty(medium: Medium): void {
    for (const part of medium.parts.values()) part.close();
    medium.parts.clear();
    this.#onChange();
  }

  #mediumOf(number: number): Medium {
    let medium = this.#media.get(number);
    if (medium === undefined) {
      medium = { teller: undefined, told: new Set(), parts: new Map() };
      this.#media.set(number, medium);
    }
    return medium;
  }
}
