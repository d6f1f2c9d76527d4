/**
 * What the tiers of a node come to hold and lose, published for routers (packages/base/events has the format). Invariants: who subscribed
 * before the node's first tier was followed has heard of every block that it holds, and who comes later hears of them when it asks; the
 * arena, whose contents end with the node, is cleared at an orderly end.
 */
import {
  type KvEvent,
  KvEventPublisher,
  type KvEventPublisherOptions,
  type SnapshotPage,
  tierEvents,
} from '@kvtier/events';
import type { Namespace } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import { followInPages, followInSlices, Slices, type Tier, type TierChange } from '@kvtier/tiers';
import { GatheredChanges } from './gathered-changes.ts';
import { TokenBook } from './token-book.ts';

export interface NodeEventsOptions extends Omit<KvEventPublisherOptions, 'logger' | 'now' | 'dataParallelRank'> {
  /** Memory for token ids of blocks, which engines are asked for then; 0, the default: events carry hashes alone. */
  readonly tokenIdBytes?: number;
  /** Default: true. false: all under `topic`, for routers that know a publisher to have one model and no attention groups. */
  readonly namespaceTopics?: boolean;
}

type FollowedTier = Pick<Tier, 'name' | 'follow' | 'followInPages'>;

/** Namespaces whose block size is remembered; blocks of further ones are published without it. */
const maxNamespaces = 4_096;
/** As an engine's events are gathered. */
const defaultGatherMs = 5;

export class NodeEvents {
  readonly #publisher: KvEventPublisher;
  readonly #ends: (() => void)[] = [];
  readonly #tiers: FollowedTier[] = [];
  readonly #slices = new Slices();
  readonly #gathered: GatheredChanges;
  readonly #blockTokens = new Map<string, number>();
  readonly #namespaceTopics: boolean;
  /** null: not asked for. */
  readonly tokens: TokenBook | null;

  private constructor(publisher: KvEventPublisher, options: NodeEventsOptions) {
    const { tokenIdBytes = 0, namespaceTopics = true, gatherMs = defaultGatherMs } = options;
    this.#publisher = publisher;
    this.#gathered = new GatheredChanges(gatherMs);
    this.#namespaceTopics = namespaceTopics;
    this.tokens = tokenIdBytes > 0 ? new TokenBook(tokenIdBytes) : null;
    publisher.tellSnapshots(() => {
      this.#gathered.flush(); // all that is held now was published before
      return this.#held();
    });
  }

  /** Where subscribers find them. */
  get source(): Pick<KvEventPublisher, 'endpoint' | 'replayEndpoint' | 'topic' | 'serverKey' | 'onServerKey'> {
    return this.#publisher;
  }

  /** KvError CONFIG, LOCKED, IO, as KvEventPublisher.start. */
  static async start(options: NodeEventsOptions, log: Log): Promise<NodeEvents> {
    const publisher = await KvEventPublisher.start({ ...options, logger: log });
    const { endpoint, replayEndpoint } = publisher;
    log.info({ endpoint, replayEndpoint }, 'publishes KV events');
    return new NodeEvents(publisher, options);
  }

  /** Publishes everything that the tier holds, the first of it now and the rest in turns to come, and every change. */
  follow(tier: FollowedTier): void {
    const publish = this.#teller(tier, (events, subtopic) => this.#publisher.publish(events, subtopic));
    const tell = this.#gathered.listener(publish);
    this.#tiers.push(tier);
    const end = followInSlices(tier, tell, this.#slices);
    this.#ends.push(() => {
      end();
      if (tier.name === 'arena') tell({ kind: 'cleared', namespace: null, hashes: [] });
    });
  }

  /** An engine has said how many tokens a block of the namespace has: the digest alone does not tell. */
  learn({ key }: Namespace, blockTokens: number): void {
    if (this.#blockTokens.size < maxNamespaces) this.#blockTokens.set(key, blockTokens);
  }

  /** Page by page, each of its moment: what comes and goes meanwhile is published, too. */
  *#held(): Generator<SnapshotPage> {
    for (const tier of this.#tiers) {
      const pages: SnapshotPage[] = [];
      const tell = this.#teller(tier, (events, subtopic) => pages.push({ events, subtopic }));
      const following = followInPages(tier, (change) => {
        if (change.kind === 'stored') tell(change as TierChange);
      });
      try {
        for (let isMore = true; isMore; ) {
          isMore = following.next();
          yield* pages.splice(0);
        }
      } finally {
        following.end();
      }
    }
  }

  #teller(
    { name: tier }: FollowedTier,
    publish: (events: readonly KvEvent[], subtopic: string) => void,
  ): (change: TierChange) => void {
    const blockTokens = ({ key }: Namespace): number => this.#blockTokens.get(key) ?? 0;
    const { tokens: book } = this;
    const tokens = book === null ? {} : { tokens: book.of.bind(book) };
    const told = (events: readonly KvEvent[], subtopic: string): void =>
      publish(events, this.#namespaceTopics ? subtopic : '');
    return tierEvents({ tier, blockTokens, publish: told, ...tokens }) as (change: TierChange) => void;
  }

  stats(): Readonly<Record<string, number>> {
    const { blocks, bytes, dropped } = this.tokens?.stats() ?? { blocks: 0, bytes: 0, dropped: 0 };
    return { ...this.#publisher.stats(), tokenBlocks: blocks, tokenBytes: bytes, tokenBlocksDropped: dropped };
  }

  async close(): Promise<void> {
    for (const end of this.#ends.splice(0)) end();
    this.#gathered.flush();
    await this.#publisher.close();
  }
}
