/** From which nodes a cache node fetches, as discovery tells it: where there are too many, a node is not a peer of each other one. */
import type { Fleet } from '@kvtier/registry';

export type Nodes = ReturnType<Fleet['nodes']>;

export class NodeLinks {
  readonly #nodes: () => Nodes;
  /** What the sets are made of. */
  #seen: Nodes = [];
  #peers = new Map<string, ReadonlySet<string>>();

  /** `nodes`: another list when anything has changed. */
  constructor(nodes: () => Nodes) {
    this.#nodes = nodes;
  }

  /** Names of those that it fetches from; undefined: it does not say. */
  of(node: string | null): ReadonlySet<string> | undefined {
    const nodes = this.#nodes();
    if (nodes !== this.#seen) {
      this.#seen = nodes;
      this.#peers = new Map();
      for (const { name, peers } of nodes) if (peers !== undefined) this.#peers.set(name, new Set(peers));
    }
    return node === null ? undefined : this.#peers.get(node);
  }
}
