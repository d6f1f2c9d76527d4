/**
 * What a node beside a foreign engine tells of its blocks: by the engine's names, and with the tokens of those of which it was told them.
 * They are named as prompts are by what all such nodes have told (foreign-names.ts), so that one which starts again, and knows the tokens of
 * its disk no more, is credited with it all the same. Here is what is of this node alone: its namespaces, and why nothing of it is named.
 */
import type { Keys, Parent } from '../kv-index.ts';
import type { Problem } from './followed-stream.ts';
import type { ForeignNames, Owner } from './foreign-names.ts';
import type { Lies } from './lies.ts';
import { mediumNumbers } from './media.ts';
import type { PackedEvent } from './packed-events.ts';
import type { Place } from './waiting-runs.ts';

export interface NodeNamesOptions {
  readonly names: ForeignNames;
  readonly blockTokens: number;
  readonly lies: Lies;
  /** Blocks by our names. */
  readonly credit: (place: Place, keys: Keys, parent: Parent) => Generator<number, void>;
  /** It is not to be credited with these, by our names. */
  readonly doubt: (keys: Keys) => void;
  /** Nothing of that namespace counts any more. */
  readonly drop: (namespace: string) => void;
  /** It was credited by what another node told. */
  readonly onChange: () => void;
  /** There was no room for the names of so many. */
  readonly onLeftOut: (blocks: number) => void;
  /** So many have none, as their tokens are not known. */
  readonly onUnnamed: (blocks: number) => void;
}

const maxNamespaces = 64;
/** All ranks of an engine store at once: who stored nothing for so long while another one did is of an engine of before. */
const formerS = 60;

export class NodeNames implements Owner {
  readonly number: number;
  readonly #options: NodeNamesOptions;
  /** Namespaces that somebody tells tokens in → when this node stored something in memory last. */
  readonly #storedS = new Map<string, number>();
  /** Since it began: it told tokens, or something of it was named; it told of memory without them; its blocks have so many. */
  #isNamed = false;
  #isBare = false;
  #otherTokens = 0;

  constructor(options: NodeNamesOptions) {
    this.#options = options;
    this.number = options.names.nextNumber();
  }

  get lies(): Lies {
    return this.#options.lies;
  }

  /** Why it tells of what it has in memory, and nothing of it can be named. */
  get problem(): Problem | undefined {
    if (this.#isNamed) return undefined;
    if (this.#otherTokens > 0) return otherSize(this.#otherTokens, this.#options.blockTokens);
    return this.#isBare ? unnamed : undefined;
  }

  /** Whose blocks an engine beside it needs now: a block is at hand where all of these have it. */
  current(): string[] {
    const newest = Math.max(0, ...this.#storedS.values());
    return [...this.#storedS].filter(([, atS]) => newest - atS <= formerS).map(([namespace]) => namespace);
  }

  *stored(place: Place, event: PackedEvent, atS: number): Generator<number, void> {
    const { names, blockTokens, lies } = this.#options;
    const { keys, tokens, parent } = event;
    const { namespace, medium } = place;
    const blocks = keys.length / 2;
    const isOfSize = event.blockTokens === 0 || event.blockTokens === blockTokens;
    if (!isOfSize) {
      this.#otherTokens = event.blockTokens;
      lies.tell('block_size', () => `blocks of ${event.blockTokens} tokens, the index has blocks of ${blockTokens}`);
    }
    // Who tells of adapters and salts tells tokens; such prompts are not looked up by tokens alone.
    if (isOfSize && (event.hasExtra || tokens.length > 0)) this.#isNamed = true;
    if (!isOfSize || event.hasExtra || blocks === 0) {
      this.leave(blocks);
      yield 1;
      return;
    }
    names.join(this);
    const isDescribed = tokens.length === blocks * blockTokens;
    if (isDescribed || names.isTold(namespace)) this.#heard(place, atS);
    if (!isDescribed && medium === mediumNumbers.cpu) this.#isBare = true;
    const run = { namespace, medium, owner: this, keys, tokens, parent, atS };
    yield* isDescribed ? names.described(run) : names.bare(run);
  }

  removed(place: Place, keys: Keys): void {
    this.#options.names.removed(this, place, keys);
  }

  cleared(place: Place): void {
    this.#options.names.cleared(this, place);
  }

  /** What it said is void; it goes on telling. */
  voided(): void {
    this.#options.names.voided(this);
    for (const namespace of this.#storedS.keys()) this.#storedS.set(namespace, 0);
  }

  /** Another process tells from now on. */
  restarted(): void {
    this.voided();
    this.#storedS.clear(); // namespaces of its former life are counted when it tells of them
    this.#isNamed = false;
    this.#isBare = false;
    this.#otherTokens = 0;
  }

  /** It tells nothing any more. */
  forget(): void {
    this.restarted();
    this.#options.names.leaves(this);
  }

  /** Those of the node's names that we have names for, by these. */
  own(keys: Keys): Keys {
    return this.#options.names.own(keys);
  }

  *credit(place: Place, own: Keys, parent: Parent, atS: number): Generator<number, void> {
    this.#isNamed = true;
    this.#heard(place, atS);
    yield* this.#options.credit(place, own, parent);
  }

  doubt(own: Keys): void {
    this.#options.doubt(own);
  }

  leaveOut(blocks: number): void {
    this.#options.onLeftOut(blocks);
  }

  leave(blocks: number): void {
    if (blocks > 0) this.#options.onUnnamed(blocks);
  }

  changed(): void {
    this.#options.onChange();
  }

  /** Of a namespace that counts. What is written down is no sign of life. */
  #heard({ namespace, medium }: Place, atS: number): void {
    const before = this.#storedS.get(namespace);
    if (before === undefined) this.#makeRoom();
    this.#storedS.set(namespace, Math.max(before ?? 0, medium === mediumNumbers.cpu ? atS : 0));
  }

  /** For one namespace more: the one that was silent longest goes. */
  #makeRoom(): void {
    if (this.#storedS.size < maxNamespaces) return;
    const silentS = Math.min(...this.#storedS.values());
    const [silent] = [...this.#storedS].find(([, atS]) => atS === silentS)!;
    this.#storedS.delete(silent);
    this.#options.names.dropped(this, silent);
    this.#options.drop(silent);
  }
}

const unnamed: Problem = {
  what: 'none of its blocks can be named, as it tells no tokens of them',
  remedy:
    'say `kvEvents.tokenIdBytes` in its configuration; what it stored before counts when it is stored again; beside SGLang, name no events of it',
};

const otherSize = (theirs: number, ours: number): Problem => ({
  what: `none of its blocks can be named, as they have ${theirs} tokens and those of the pods ${ours}`,
  remedy: "let the node's engines have blocks as the other pods",
});
