/**
 * What the tiers of a node come to hold and lose, published for routers (packages/base/events has the format). Invariants: who subscribed
 * before the node's first tier was followed has heard of every block that it holds; the arena, whose contents end with the node, is
 * cleared at an orderly end.
 */
import { KvEventPublisher, type KvEventPublisherOptions, tierEvents } from '@kvtier/events';
import type { Namespace } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import { followInSlices, Slices, type Tier, type TierChange } from '@kvtier/tiers';

export type NodeEventsOptions = Omit<KvEventPublisherOptions, 'logger' | 'now' | 'dataParallelRank'>;

/** Namespaces whose block size is remembered; blocks of further ones are published without it. */
const maxNamespaces = 4_096;

export class NodeEvents {
  readonly #publisher: KvEventPublisher;
  readonly #ends: (() => void)[] = [];
  readonly #slices = new Slices();
  readonly #blockTokens = new Map<string, number>();

  /** Where subscribers find them. */
  readonly source: { readonly endpoint: string; readonly replayEndpoint: string | null; readonly topic: string };

  private constructor(publisher: KvEventPublisher, topic: string) {
    this.#publisher = publisher;
    this.source = { endpoint: publisher.endpoint, replayEndpoint: publisher.replayEndpoint, topic };
  }

  /** KvError CONFIG, LOCKED, IO, as KvEventPublisher.start. */
  static async start(options: NodeEventsOptions, log: Log): Promise<NodeEvents> {
    const publisher = await KvEventPublisher.start({ ...options, logger: log });
    const { endpoint, replayEndpoint } = publisher;
    log.info({ endpoint, replayEndpoint }, 'publishes KV events');
    return new NodeEvents(publisher, options.topic ?? '');
  }

  /** Publishes everything that the tier holds, the first of it now and the rest in turns to come, and every change. */
  follow(tier: Pick<Tier, 'name' | 'follow' | 'followInPages'>): void {
    const tell = tierEvents({
      tier: tier.name,
      blockTokens: ({ key }) => this.#blockTokens.get(key) ?? 0,
      publish: (events, subtopic) => this.#publisher.publish(events, subtopic),
    });
    const end = followInSlices(tier, tell as (change: TierChange) => void, this.#slices);
    this.#ends.push(() => {
      end();
      if (tier.name === 'arena') tell({ kind: 'cleared', namespace: null, hashes: [] });
    });
  }

  /** An engine has said how many tokens a block of the namespace has: the digest alone does not tell. */
  learn({ key }: Namespace, blockTokens: number): void {
    if (this.#blockTokens.size < maxNamespaces) this.#blockTokens.set(key, blockTokens);
  }

  stats(): Readonly<Record<string, number>> {
    return { ...this.#publisher.stats() };
  }

  async close(): Promise<void> {
    for (const end of this.#ends.splice(0)) end();
    await this.#publisher.close();
  }
}
