/**
 * The KV indexes of a coordinator, one for each model: blocks of two models never are the same. They share the bytes equally; when a model
 * comes or goes the others stay as they are, but for one that has taken more than its new share already: it begins anew, and what its
 * publishers hold is asked for again.
 *
 * A model with one worker of ours needs none: there is nothing to choose, and the worker itself says what it had. Of a pod nobody else can
 * say what it holds, and not every pod can tell of its blocks again when a second one comes; who plans by the share that is held asks, too.
 *
 * Invariants: who asks sees the workers that there are (`LateLook`). What is wrong with one model disturbs no other: it is routed without
 * an index, and one line says why.
 */
import type { EventAccess, NodeRecord } from '@kvtier/config';
import type { Held, Holdings } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { defaultRootSeed, parseHashAlgorithm } from '@kvtier/identity';
import {
  type FeedState,
  type FeedTotals,
  type FollowedWorker,
  IndexFeed,
  type IndexFeedOptions,
  type Keys,
  maxMedia,
  mediumNumbers,
  sumOf,
} from '@kvtier/kv-index';
import { type Fleet, LateLook, type Worker } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';

export interface IndexesOptions {
  readonly fleet: Pick<Fleet, 'workers' | 'nodes' | 'onChange'>;
  /** Of all of them. */
  readonly maxBytes: number;
  /** Models whose tokenizers are known though their workers do not say them. */
  readonly tokenizers: Readonly<Record<string, string>>;
  /** How publishers on other hosts may be read. */
  readonly access?: EventAccess;
  /** A model with one worker of ours has an index, too: somebody plans by what is held. */
  readonly isPlanned?: boolean;
  readonly logger: Logger;
}

/** Models beyond are routed without an index. */
const maxModels = 16;
/** Where blocks have no size: prompts are text (four bytes count as a token). */
const textBlockTokens = 64;
/** Where there is no index. */
const unknown: Held = { blocks: 0, byMedium: new Int32Array(maxMedia), isUnknown: true };

/** A model's workers. */
type Group = readonly [Worker, ...Worker[]];

/** How prompts and blocks of a model are named. */
type Names = Required<Pick<IndexFeedOptions, 'blockTokens' | 'hashAlgorithm' | 'isTranslating'>> & {
  readonly hashSeed: string;
};

interface Made {
  readonly feed: IndexFeed;
  /** What it was made for. */
  readonly key: string;
  readonly isTranslating: boolean;
}

export class Indexes implements Holdings {
  /** Names of the media, by their numbers. */
  static readonly media: readonly string[] = Object.entries(mediumNumbers).reduce<string[]>((names, [name, number]) => {
    names[number] = name;
    return names;
  }, []);

  readonly #options: IndexesOptions;
  /** By model. */
  readonly #made = new Map<string, Made>();
  readonly #looks: LateLook;
  /** Model → why it has none. */
  readonly #refused = new Map<string, string>();
  #past = sumOf([]);

  constructor(options: IndexesOptions) {
    this.#options = options;
    this.#looks = new LateLook(options.fleet, () => this.#follow());
    this.#follow();
  }

  match(model: string, keys: Keys, numbers: readonly number[]): readonly Held[] {
    return this.#feedOf(model)?.match(keys, numbers) ?? numbers.map(() => unknown);
  }

  sent(model: string, number: number, keys: Keys): void {
    this.#feedOf(model)?.sent(number, keys);
  }

  /** What some of these workers hold is guessed from what they were sent. */
  guesses(model: string, numbers: readonly number[]): boolean {
    return this.#feedOf(model)?.guesses(numbers) ?? false;
  }

  /** What some worker holds is, and there are others to choose. */
  get isGuessing(): boolean {
    return Object.values(this.state()).some(
      ({ workers }) => workers.length > 1 && workers.some(({ why }) => why !== undefined),
    );
  }

  /** By model. */
  state(): Readonly<Record<string, FeedState>> {
    this.#looks.now();
    return Object.fromEntries([...this.#made].map(([model, { feed }]) => [model, feed.state()]));
  }

  /** Of indexes that have ended. */
  past(): FeedTotals {
    this.#looks.now();
    return this.#past;
  }

  close(): void {
    this.#looks.close();
    for (const model of [...this.#made.keys()]) this.#end(model);
  }

  #feedOf(model: string): IndexFeed | undefined {
    this.#looks.now();
    return this.#made.get(model)?.feed;
  }

  #follow(): void {
    const groups = this.#groups();
    const nodes = new Map(this.#options.fleet.nodes().map((node) => [node.name, node]));
    const names = new Map<string, Names>();
    for (const [model, group] of groups) this.#each(model, () => names.set(model, this.#namesOf(group, nodes)));
    const keyOf = (model: string): string => JSON.stringify(names.get(model));
    for (const model of this.#refused.keys()) if (!groups.has(model)) this.#refused.delete(model);
    for (const [model, { key }] of [...this.#made]) if (keyOf(model) !== key) this.#end(model);
    const { maxBytes: allBytes, access, logger } = this.#options;
    const maxBytes = Math.floor(allBytes / Math.max(groups.size, 1));
    // All give before anybody takes.
    for (const [model, { feed }] of [...this.#made])
      this.#each(model, () => {
        if (feed.resize(maxBytes)) return;
        logger.warn({ model }, `KV index of ${model}: has taken more than its share of ${maxBytes} bytes; begins anew`);
        this.#end(model);
      });
    for (const [model, its] of names) {
      const group = groups.get(model)!;
      this.#each(model, () => {
        let feed = this.#made.get(model)?.feed;
        if (feed === undefined) {
          feed = new IndexFeed({ maxBytes, ...its, access, logger });
          this.#made.set(model, { feed, key: keyOf(model), isTranslating: its.isTranslating });
        }
        feed.follow(this.#followed(group, nodes));
        this.#refused.delete(model);
      });
    }
  }

  #followed(group: Group, nodes: ReadonlyMap<string, NodeRecord>): FollowedWorker[] {
    const unread = this.#isText(group[0]) ? unreadText : undefined;
    return group.map(
      ({ number, record, facts }): FollowedWorker => ({
        ...{ number, record, unread: unread?.(record.events !== null) },
        node: record.node === null || unread ? undefined : nodes.get(record.node),
        totalBlocks: facts!.totalBlocks,
        bootEpoch: facts!.bootEpoch,
        ...(facts!.namespaces && { namespaces: facts!.namespaces }),
        ...(facts!.engines && { engines: facts!.engines }),
      }),
    );
  }

  /** A part of the look that is of one model. */
  #each(model: string, look: () => void): void {
    try {
      look();
    } catch (error) {
      const { message } = KvError.from(error);
      this.#end(model);
      if (this.#refused.get(model) === message) return;
      this.#refused.set(model, message);
      this.#options.logger.warn({ model }, `KV index of ${model}: ${message}; its requests are routed without one`);
    }
  }

  #end(model: string): void {
    const feed = this.#feedOf(model);
    if (feed === undefined) return;
    feed.close();
    this.#past = sumOf([this.#past, feed.state().totals]);
    this.#made.delete(model);
  }

  /** Models that have an index; those that have one stay before others get one. */
  #groups(): Map<string, Group> {
    const all = new Map<string, [Worker, ...Worker[]]>();
    for (const worker of this.#options.fleet.workers()) {
      if (worker?.facts === undefined || worker.state === 'refused') continue;
      const group = all.get(worker.facts.model);
      if (group === undefined) all.set(worker.facts.model, [worker]);
      else group.push(worker);
    }
    const { isPlanned = false } = this.#options;
    const worth = [...all].filter(
      ([, group]) => isPlanned || group.length > 1 || group.some(({ record }) => record.kind === 'openai'),
    );
    const [known, others] = [true, false].map((is) => worth.filter(([model]) => this.#made.has(model) === is));
    return new Map([...known!, ...others!].slice(0, maxModels));
  }

  /** Nobody says where its tokenizer is. */
  #isText({ facts }: Worker): boolean {
    // Workers name their models as they like.
    return facts!.modelDir === '' && !Object.hasOwn(this.#options.tokenizers, facts!.model);
  }

  /** How prompts and blocks are named. Of workers that hash otherwise than we do, the index translates what they tell. */
  #namesOf(group: Group, nodes: ReadonlyMap<string, NodeRecord>): Names {
    const { facts } = group.find((worker) => worker.facts!.blockTokens > 0) ?? group[0];
    const { blockTokens, hashAlgorithm, hashSeed, modelDir } = facts!;
    const isOurs = modelDir !== '' && hashAlgorithm !== '';
    const isRead = (node: string | null): boolean => node !== null && (nodes.get(node)?.events ?? null) !== null;
    // A node that goes may come again: the index would begin anew twice.
    const before = this.#made.get(facts!.model)?.isTranslating === true;
    const isTranslating = group.some(
      ({ record }) => record.kind === 'openai' && (before || record.events !== null || isRead(record.node)),
    );
    return {
      blockTokens: blockTokens > 0 ? blockTokens : textBlockTokens,
      hashAlgorithm: isOurs ? parseHashAlgorithm(hashAlgorithm) : ('sha256_cbor' as const),
      hashSeed: isOurs ? hashSeed : defaultRootSeed,
      isTranslating: isTranslating && !this.#isText(group[0]),
    };
  }
}

/** What is told of tokens says nothing of texts. */
function unreadText(isPublishing: boolean): NonNullable<FollowedWorker['unread']> {
  const remedy = "name the model's folder in `tokenizers`";
  if (isPublishing) return { what: 'its KV events are not read', remedy };
  return { what: 'publishes no KV events', remedy: `let it, say where in its record (\`events\`), and ${remedy}` };
}
