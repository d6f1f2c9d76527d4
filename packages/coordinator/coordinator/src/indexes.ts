/**
 * The KV indexes of a coordinator, one for each model: blocks of two models never are the same. They share the bytes equally; when a model
 * comes or goes all begin anew, and what publishers hold is asked for again.
 *
 * A model with one worker needs none: there is nothing to choose.
 */
import type { EventAccess } from '@kvtier/config';
import type { Held, Holdings } from '@kvtier/dispatch';
import { defaultRootSeed, parseHashAlgorithm } from '@kvtier/identity';
import { type FeedState, type FollowedWorker, IndexFeed, type Keys, maxMedia, mediumNumbers } from '@kvtier/kv-index';
import type { Fleet, Worker, WorkerFacts } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';

export interface IndexesOptions {
  readonly fleet: Pick<Fleet, 'workers' | 'nodes' | 'onChange'>;
  /** Of all of them. */
  readonly maxBytes: number;
  /** Models whose tokenizers are known though their workers do not say them. */
  readonly tokenizers: Readonly<Record<string, string>>;
  /** How publishers on other hosts may be read. */
  readonly access?: EventAccess;
  readonly logger: Logger;
}

/** Models beyond are routed without an index. */
const maxModels = 16;
/** Where blocks have no size: prompts are text (four bytes count as a token). */
const textBlockTokens = 64;
const nothing: Held = { blocks: 0, byMedium: new Int32Array(maxMedia) };

/** A model's workers, and how they name blocks. */
interface Group {
  readonly facts: WorkerFacts;
  readonly workers: Worker[];
}

export class Indexes implements Holdings {
  /** Names of the media, by their numbers. */
  static readonly media: readonly string[] = Object.entries(mediumNumbers).reduce<string[]>((names, [name, number]) => {
    names[number] = name;
    return names;
  }, []);

  readonly #options: IndexesOptions;
  readonly #feeds = new Map<string, IndexFeed>();
  readonly #stopListening: () => void;
  /** What the feeds were made for. */
  #madeFor = '';

  constructor(options: IndexesOptions) {
    this.#options = options;
    this.#stopListening = options.fleet.onChange(() => this.#follow());
    this.#follow();
  }

  match(model: string, keys: Keys, numbers: readonly number[]): readonly Held[] {
    return this.#feeds.get(model)?.match(keys, numbers) ?? numbers.map(() => nothing);
  }

  sent(model: string, number: number, keys: Keys): void {
    this.#feeds.get(model)?.sent(number, keys);
  }

  /** What some of these workers hold is guessed from what they were sent. */
  guesses(model: string, numbers: readonly number[]): boolean {
    return this.#feeds.get(model)?.guesses(numbers) ?? false;
  }

  /** What some worker holds is. */
  get isGuessing(): boolean {
    return Object.values(this.state()).some(({ workers }) => workers.some(({ why }) => why !== undefined));
  }

  /** By model. */
  state(): Readonly<Record<string, FeedState>> {
    return Object.fromEntries([...this.#feeds].map(([model, feed]) => [model, feed.state()]));
  }

  close(): void {
    this.#stopListening();
    for (const feed of this.#feeds.values()) feed.close();
    this.#feeds.clear();
  }

  #follow(): void {
    const groups = this.#groups();
    const madeFor = JSON.stringify([...groups].map(([model, { facts }]) => [model, namesOf(facts)]));
    if (madeFor !== this.#madeFor) {
      this.#madeFor = madeFor;
      for (const feed of this.#feeds.values()) feed.close();
      this.#feeds.clear();
      const { maxBytes, access, logger } = this.#options;
      for (const [model, { facts }] of groups) {
        const names = namesOf(facts);
        this.#feeds.set(
          model,
          new IndexFeed({ maxBytes: Math.floor(maxBytes / groups.size), ...names, access, logger }),
        );
      }
    }
    const nodes = new Map(this.#options.fleet.nodes().map((node) => [node.name, node]));
    for (const [model, { workers }] of groups) {
      const isText = this.#isText(workers[0]!);
      this.#feeds.get(model)!.follow(
        workers.map(
          ({ number, record, facts }): FollowedWorker => ({
            number,
            // What is told of tokens says nothing of texts.
            record: isText ? { ...record, events: null } : record,
            node: record.node === null || isText ? undefined : nodes.get(record.node),
            totalBlocks: facts!.totalBlocks,
            bootEpoch: facts!.bootEpoch,
            ...(facts!.namespaces && { namespaces: facts!.namespaces }),
          }),
        ),
      );
    }
  }

  /** Models with several workers. */
  #groups(): Map<string, Group> {
    const groups = new Map<string, Group>();
    for (const worker of this.#options.fleet.workers()) {
      if (worker?.facts === undefined || worker.state === 'refused') continue;
      const group = groups.get(worker.facts.model);
      if (group !== undefined) group.workers.push(worker);
      else if (groups.size < maxModels) groups.set(worker.facts.model, { facts: worker.facts, workers: [worker] });
    }
    for (const [model, { workers }] of groups) if (workers.length < 2) groups.delete(model);
    return groups;
  }

  /** Nobody says where its tokenizer is. */
  #isText({ facts }: Worker): boolean {
    return facts!.modelDir === '' && this.#options.tokenizers[facts!.model] === undefined;
  }
}

/** Of workers that hash otherwise than we do, the index translates what they tell. */
function namesOf({ blockTokens, hashAlgorithm, hashSeed, modelDir }: WorkerFacts) {
  const isOurs = modelDir !== '' && hashAlgorithm !== '';
  return {
    blockTokens: blockTokens > 0 ? blockTokens : textBlockTokens,
    hashAlgorithm: isOurs ? parseHashAlgorithm(hashAlgorithm) : ('sha256_cbor' as const),
    hashSeed: isOurs ? hashSeed : defaultRootSeed,
  };
}
