/**
 * Which nodes of the list are peers of one of them, where there are more than it may have. Those come first beside which workers compute
 * prompts for others: what is computed there travels, so that a node beside a decode worker fetches from all of them as long as they are no
 * more than it may have peers. Then another choice at each node, and the same as long as nobody comes or goes. Roles are those of the
 * workers in the list; pods are in none, and there the node's own record says what stands beside it.
 */
import { createHash } from 'node:crypto';
import type { Membership, NodeRecord } from '@kvtier/config';

export class PeerChoice {
  readonly #own: string;
  /** Nodes beside which prompts are computed for others: also while the worker there is away for a moment, as when it is started anew. */
  #prefill = new Set<string>();

  constructor(own: string) {
    this.#own = own;
  }

  /** `nodes`: all that may be peers. Returns them, the preferred ones first. */
  order<T extends Pick<NodeRecord, 'name' | 'role'>>(nodes: readonly T[], workers: Membership['workers']): T[] {
    const roles = new Map<string, boolean>();
    for (const { node, role } of workers)
      if (node !== null) roles.set(node, roles.get(node) === true || role !== 'decode');
    const takesPrefill = ({ name, role }: T): boolean =>
      roles.get(name) ?? (role === undefined ? this.#prefill.has(name) : role !== 'decode');
    const prefill = nodes.filter(takesPrefill);
    this.#prefill = new Set(prefill.map(({ name }) => name));
    return nodes
      .map((node) => ({ node, last: this.#prefill.has(node.name) ? 0 : 1, far: this.#distance(node.name) }))
      .sort((a, b) => a.last - b.last || (a.far < b.far ? -1 : 1))
      .map(({ node }) => node);
  }

  #distance(other: string): string {
    return createHash('sha256').update([this.#own, other].sort().join('\0')).digest('hex');
  }
}
