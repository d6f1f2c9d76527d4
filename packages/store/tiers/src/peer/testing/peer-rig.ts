/** What tests of peers begin with: a bench of the node that fetches, nodes that give to it, and all of it ended in turn. */
import { join } from 'node:path';
import { TestBench } from '../../kit/testing/objects.ts';
import type { PeerLoops } from '../peer-loops.ts';
import type { PeerServerOptions } from '../peer-server.ts';
import type { PeerTier, PeerTierOptions } from '../peer-tier.ts';
import { fetchingTier, GivingNode, loopsOf, sharedSecret } from './peer-pair.ts';

export class PeerRig {
  /** Of the node that fetches. */
  readonly bench = new TestBench();
  readonly #ends: (() => unknown)[] = [];

  /** What is said last ends first. */
  onEnd(end: () => unknown): void {
    this.#ends.push(end);
  }

  /** A node with an arena of its own; `stallMs`, `maxConnections`: of its loops. */
  async give(
    options: Partial<PeerServerOptions> = {},
    name = 'remote',
    stallMs?: number,
    maxConnections?: number,
  ): Promise<GivingNode> {
    const remote = new TestBench(8 << 20, join(this.bench.dir, name));
    const node = await GivingNode.open(remote, options, stallMs, maxConnections);
    this.onEnd(async () => {
      await node.close();
      remote.dispose();
    });
    return node;
  }

  /** A tier of our bench. */
  fetchFrom(
    ports: readonly number[],
    options: Partial<PeerTierOptions> = {},
  ): { readonly tier: PeerTier; readonly loops: PeerLoops } {
    const loops = loopsOf(this.bench, options.security ?? sharedSecret());
    const tier = fetchingTier(this.bench, loops, ports, options);
    this.onEnd(async () => {
      await tier.close();
      await loops.close();
    });
    return { tier, loops };
  }

  async end(): Promise<void> {
    for (const end of this.#ends.reverse()) await end();
    this.bench.dispose();
  }
}
