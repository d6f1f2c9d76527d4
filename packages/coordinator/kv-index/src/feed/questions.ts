/**
 * What is asked of the index for a list of workers: whose blocks count for each, and what its node can fetch from other nodes. Worked out
 * anew when somebody came, went or can no longer be relied on, and kept in between, for a decision has no time for it.
 */
import { type Target, Targets } from '../targets.ts';
import type { EngineListing } from './engine-listing.ts';
import type { NodeEntry, WorkerEntry } from './followed.ts';
import type { Part } from './part.ts';
import type { SharedBlocks } from './shared-blocks.ts';
import { type GroupView, plainTarget, type WorkerView } from './views.ts';

/** What one look at the index asks, for a list of workers. */
export interface Asked {
  /** As they were: the caller's list may change. */
  readonly numbers: readonly number[];
  /** One for each of them, then the pools. */
  readonly targets: Targets;
  /** Of those that are not one plain target. */
  readonly views: readonly (WorkerView | undefined)[];
  /** Which targets are the pools that each can fetch from: what is in all of these. None: it can fetch nothing. */
  readonly pools: readonly (readonly number[])[];
}

const partsIn = (listing: EngineListing, isOneOfSeveral: boolean): readonly (Part | undefined)[][] => {
  const ranks = listing.ranks();
  return ranks.length === 0 && isOneOfSeveral ? [[]] : ranks;
};

const nothing: Target = { sources: [] };
const none = -1;

export class Questions {
  readonly #workers: ReadonlyMap<number, WorkerEntry>;
  readonly #nodes: ReadonlyMap<string, NodeEntry>;
  readonly #shared: SharedBlocks;
  readonly #blockTokens: number;
  #isStale = false;
  /** By the caller's own list of workers, until something changes. */
  #asked = new WeakMap<readonly number[], Asked>();
  /** Namespace → all that other nodes can fetch. */
  readonly #pools = new Map<string, Target>();

  constructor(
    workers: ReadonlyMap<number, WorkerEntry>,
    nodes: ReadonlyMap<string, NodeEntry>,
    shared: SharedBlocks,
    blockTokens: number,
  ) {
    this.#workers = workers;
    this.#nodes = nodes;
    this.#shared = shared;
    this.#blockTokens = blockTokens;
  }

  /** What is asked must be worked out anew. */
  changed(): void {
    this.#isStale = true;
  }

  /** Of these workers. Numbers that are not followed have nothing. */
  of(numbers: readonly number[]): Asked {
    if (this.#isStale) this.#review();
    const known = this.#asked.get(numbers);
    if (known?.numbers.length === numbers.length && known.numbers.every((number, i) => number === numbers[i]))
      return known;
    const namespaces = [...this.#pools.keys()];
    const entries = numbers.map((number) => this.#workers.get(number));
    const plain = entries.map((entry) => entry && plainTarget(entry.view));
    const asked: Asked = {
      numbers: [...numbers],
      targets: new Targets([...plain.map((target) => target ?? nothing), ...this.#pools.values()]),
      views: entries.map((entry, i) => (plain[i] === undefined ? entry?.view : undefined)),
      pools: entries.map((entry, i) => {
        if (entry === undefined || (plain[i] === undefined && !entry.node?.listing?.isRenamed)) return [];
        const pools = this.#namespacesOf(entry).map((namespace) => namespaces.indexOf(namespace));
        // Of groups with windows nobody says what of each can be fetched; of ranks each has to have its part.
        return pools.includes(none) ? [] : pools.map((pool) => numbers.length + pool);
      }),
    };
    this.#asked.set(numbers, asked);
    return asked;
  }

  /** All that any node can fetch, from other nodes and from shared tiers: a target for each namespace. */
  anywhere(): Target[] {
    if (this.#isStale) this.#review();
    const namespaces = new Set([...this.#pools.keys(), ...this.#shared.namespaces]);
    return [...namespaces].map((namespace) => ({
      sources: [
        ...(this.#pools.get(namespace)?.sources ?? []),
        ...this.#shared.all(namespace).map(({ source }) => source),
      ],
    }));
  }

  #review(): void {
    this.#isStale = false;
    this.#asked = new WeakMap();
    for (const entry of this.#workers.values()) entry.view = this.#viewOf(entry);
    this.#pools.clear();
    for (const { record, listing, why } of this.#nodes.values()) {
      if (record.peer === null || why !== undefined) continue;
      for (const namespace of listing?.namespaces ?? []) {
        const part = listing!.partOf(namespace);
        if (part === undefined) continue;
        this.#pools.set(namespace, { sources: [...(this.#pools.get(namespace)?.sources ?? []), part.source] });
      }
    }
  }

  #viewOf(entry: WorkerEntry): WorkerView {
    const { listings, history, node, why } = entry;
    const namespaces = this.#namespacesOf(entry);
    const beside = (group: number): readonly number[] => {
      const namespace = namespaces[group];
      if (namespace === undefined || node === undefined || node.why !== undefined) return [];
      const own = node.listing?.partOf(namespace);
      return [...(own ? [own] : []), ...this.#shared.partsOf(node.teller, namespace)].map(({ source }) => source);
    };
    const guessed = why === undefined ? undefined : (history?.sources ?? []);
    // Of several engines one that has told of nothing holds nothing.
    const ranks = guessed === undefined ? listings.flatMap((one) => partsIn(one, listings.length > 1)) : [];
    // Of an engine that hashes otherwise one group stands for all, and each rank's namespace needs what the engine itself has not.
    const isRenamed = node?.listing?.isRenamed === true;
    const groupCount = Math.max(1, namespaces.length, ...ranks.map((groups) => groups.length));
    return (ranks.length > 0 ? ranks : [[]]).map((parts) =>
      Array.from({ length: groupCount }, (_, group): GroupView => {
        const part = parts[isRenamed ? 0 : group];
        const tokens = part?.window.tokens;
        return {
          sources: [...(guessed ?? (part ? [part.source] : [])), ...beside(group)],
          windowBlocks: tokens === undefined ? undefined : Math.max(1, Math.ceil((tokens - 1) / this.#blockTokens)),
        };
      }),
    );
  }

  /** Of its attention groups. Not known: the only one that its node has told of. */
  #namespacesOf({ followed, node }: WorkerEntry): readonly string[] {
    if (followed.namespaces !== undefined) return followed.namespaces;
    if (node?.listing?.isRenamed) return node.listing.namespaces;
    const told = new Set([...(node?.listing?.namespaces ?? []), ...(node ? this.#shared.namespaces : [])]);
    return told.size === 1 ? [...told] : [];
  }
}
