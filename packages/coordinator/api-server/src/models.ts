/**
 * The models that are served, by the names that their workers give them, with what their texts need. A model is served as long as
 * discovery names a worker of it, whether or not that worker answers now. One that has none any more can still be read: its requests
 * are not unknown, and may wait for the next worker.
 *
 * Invariants: a model's texts are read once, however many workers serve it; what cannot be read is told in one line and tried again; who
 * asks sees the workers that there are (`LateLook`).
 */
import { setTimeout as sleep } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import { defaultRootSeed } from '@kvtier/identity';
import { LateLook, type Worker, type WorkerFacts } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';
import type { Engines } from './engines.ts';
import { isAlike, named, type OtherNames, otherNamesOf } from './other-names.ts';
import type { BlockNames } from './prompt-keys.ts';
import type { TextModel } from './text-model.ts';
import type { LoadedText, TextPool } from './text-pool.ts';

export interface Model {
  readonly name: string;
  /** Of an adapter: the model that it is one of. */
  readonly parent?: string;
  readonly text: LoadedText;
  /** Of prompt and answer: as the model was made, and no more than some worker's pool holds. */
  readonly maxModelTokens: number;
  readonly stopTokenIds: readonly number[];
  /** When this API server met the model, seconds since 1970: `created` of /v1/models. */
  readonly createdSeconds: number;
}

export interface ModelsOptions {
  readonly engines: Pick<Engines, 'workers' | 'onChange'>;
  readonly text: Pick<TextPool, 'load'>;
  /** Folder of tokenizer and chat template by model name, where workers do not say it. */
  readonly tokenizers: Readonly<Record<string, string>>;
  readonly logger: Logger;
  /** Told after each change of workers or models. */
  readonly onChange?: () => void;
}

/** Names beyond are not served. */
const maxModels = 64;
/** Before a model whose files could not be read is tried again. */
const againMs = 1_000;

/** What one name stands for. */
interface Entry {
  text: TextModel;
  model: Model | undefined;
  problem: KvError | undefined;
  /** Names of its workers, where some are of another kind; undefined: all of that model. */
  among: ReadonlySet<string> | undefined;
  /** What else pods call it, and which of them do. */
  others: OtherNames;
  /** performance.now() since which it has no worker. */
  leftAtMs: number | undefined;
}

export class Models {
  readonly #options: ModelsOptions;
  readonly #entries = new Map<string, Entry>();
  readonly #closing = new AbortController();
  #looks: LateLook | undefined;
  #version = 0;
  #wasWaiting = false;
  /** Told after each change, while it starts. */
  #startChanged: () => void = () => {};

  constructor(options: ModelsOptions) {
    this.#options = options;
  }

  /**
   * Follows the workers from now on. Resolves when a model is served, when there is no worker that could come to serve one, or at
   * `firstContactMs`: workers may come later.
   * @throws KvError MODEL when no model can be served, and no worker is on its way that may serve another
   */
  async start(firstContactMs: number): Promise<void> {
    this.#looks = new LateLook(this.#options.engines, () => this.#look());
    this.#look();
    const end = performance.now() + firstContactMs;
    const isComing = (): boolean =>
      this.#options.engines.workers().some((worker) => worker !== undefined && worker.state !== 'refused');
    const { signal } = this.#closing;
    while (this.all().length === 0 && isComing() && performance.now() < end && !signal.aborted) {
      const entries = [...this.#current.values()];
      if (!this.isWaiting && entries.every(({ problem }) => problem?.code === 'MODEL') && entries[0]?.problem)
        throw entries[0].problem;
      await new Promise<void>((resolve) => {
        const timer = setTimeout(resolve, end - performance.now());
        this.#startChanged = () => {
          clearTimeout(timer);
          resolve();
        };
      });
    }
    this.#startChanged = () => {};
  }

  close(): void {
    this.#looks?.close();
    this.#closing.abort();
    this.#changed();
  }

  /** Those whose texts are there. */
  all(): Model[] {
    const models: Model[] = [];
    for (const entry of this.#current.values())
      if (entry.model !== undefined && entry.leftAtMs === undefined) models.push(named(entry.model, entry.others));
    return models;
  }

  /** Those that have workers, whether or not their texts are there. */
  get count(): number {
    let count = 0;
    for (const { leftAtMs } of this.#current.values()) if (leftAtMs === undefined) count++;
    return count;
  }

  get(name: string): Model | undefined {
    const entry = this.#current.get(name);
    return entry === undefined
      ? this.named().find((model) => model.name === name)
      : entry.leftAtMs === undefined
        ? entry.model
        : undefined;
  }

  /** Each name that is served, other names behind the model that they stand for. @throws as `served` */
  named(): Model[] {
    const names = new Set(this.#current.keys());
    return this.served().flatMap((model) => {
      const others = (model.text.model.otherNames ?? []).filter(({ name }) => !names.has(name) && names.add(name));
      return [
        model,
        ...others.map(({ name, isAdapter }) => ({ ...model, name, ...(isAdapter && { parent: model.name }) })),
      ];
    });
  }

  /** Since when this model, or the last of any that has none, has no worker; undefined: it has, or never had. */
  leftAtMs(name?: string): number | undefined {
    if (name !== undefined) return this.#current.get(name)?.leftAtMs;
    let last: number | undefined;
    for (const { leftAtMs } of this.#current.values()) if (leftAtMs !== undefined) last = Math.max(last ?? 0, leftAtMs);
    return last;
  }

  /** Names of the only workers that get this model's requests; undefined: all that serve it. */
  among(name: string): ReadonlySet<string> | undefined {
    const entry = this.#current.get(name);
    if (entry !== undefined) return entry.among;
    for (const { others } of this.#current.values()) {
      const other = others.find((one) => one.name === name);
      if (other !== undefined) return other.among;
    }
    return undefined;
  }

  /** As `all`. @throws KvError DISCONNECTED or MODEL: why there is none */
  served(): Model[] {
    const models = this.all();
    if (models.length > 0) return models;
    for (const { problem } of this.#entries.values()) if (problem !== undefined) throw problem;
    throw nobody(this.#options.engines.workers());
  }

  /** Those that requests may name: those served, and those without a worker now, which say so (`hasLeft`). @throws as `served` */
  readable(): Model[] {
    const models: Model[] = [];
    for (const entry of this.#current.values()) {
      if (entry.model === undefined) continue;
      const model = named(entry.model, entry.others);
      const { text } = model;
      models.push(
        entry.leftAtMs === undefined ? model : { ...model, text: { ...text, model: { ...text.model, hasLeft: true } } },
      );
    }
    return models.length > 0 ? models : this.served();
  }

  /** Some worker has not said yet what it serves. */
  get isWaiting(): boolean {
    return this.#options.engines.workers().some((worker) => worker?.state === 'joining' && worker.facts === undefined);
  }

  /** The texts of some model are being read: it will be served. */
  get isReading(): boolean {
    for (const { model, problem } of this.#current.values())
      if (model === undefined && problem === undefined) return true;
    return false;
  }

  /** Another one after each change of what is served, or may be. */
  get version(): number {
    this.#looks?.now();
    return this.#version;
  }

  get #current(): ReadonlyMap<string, Entry> {
    this.#looks?.now();
    return this.#entries;
  }

  #changed(): void {
    this.#startChanged();
    this.#options.onChange?.();
  }

  #look(): void {
    const wanted = new Map<string, TextModel>();
    for (const worker of this.#options.engines.workers()) {
      if (worker?.facts === undefined || worker.state === 'refused') continue;
      const { model } = worker.facts;
      const known = wanted.get(model);
      if (known !== undefined && !known.isPassedOn) continue; // our own workers first
      if (known === undefined || worker.record.kind === 'kvtier')
        wanted.set(model, this.#textModel(worker, worker.facts));
    }
    for (const [name, entry] of this.#entries) {
      if (wanted.has(name) || entry.leftAtMs !== undefined) continue;
      if (entry.model === undefined) this.#entries.delete(name);
      else entry.leftAtMs = performance.now();
      this.#version++;
    }
    if (this.#wasWaiting !== this.isWaiting) this.#version++;
    this.#wasWaiting = this.isWaiting;
    for (const [name, text] of wanted) {
      const entry = this.#entries.get(name);
      const among = this.#amongOf(text);
      const others = otherNamesOf(text, this.#options.engines.workers());
      // Of one that was away the files may be others, whatever is said of them.
      if (entry !== undefined && entry.leftAtMs === undefined && isSame(entry.text, text)) {
        entry.among = among;
        if (!isAlike(entry.others, others)) this.#version++;
        entry.others = others;
        if (entry.text.maxModelTokens !== text.maxModelTokens) this.#hasContext(entry, text.maxModelTokens);
        continue;
      }
      if (entry === undefined && this.#entries.size >= maxModels && !this.#forgetOne()) continue;
      // Until the new texts are read, the old ones serve, unless they would be other words to the workers that are there now.
      const model = entry?.text.textDigest === text.textDigest ? entry?.model : undefined;
      const next: Entry = { text, model, problem: undefined, among, others, leftAtMs: undefined };
      this.#entries.set(name, next);
      this.#version++;
      void this.#load(next);
    }
    this.#changed();
  }

  /** Pools of other sizes came or left: its texts are what they were. */
  #hasContext(entry: Entry, maxModelTokens: number): void {
    entry.text = { ...entry.text, maxModelTokens };
    entry.model &&= { ...entry.model, maxModelTokens, text: { ...entry.model.text, model: entry.text } };
    this.#version++;
  }

  /** Of those without a worker, the one that has had none for longest. False: all have one. */
  #forgetOne(): boolean {
    let oldest: Entry | undefined;
    for (const entry of this.#entries.values())
      if (entry.leftAtMs !== undefined && entry.leftAtMs < (oldest?.leftAtMs ?? Number.POSITIVE_INFINITY))
        oldest = entry;
    return oldest !== undefined && this.#entries.delete(oldest.text.name);
  }

  async #load(entry: Entry): Promise<void> {
    const { text, logger } = this.#options;
    const { name } = entry.text;
    while (this.#entries.get(name) === entry && !this.#closing.signal.aborted) {
      try {
        const loaded = await text.load(entry.text);
        const stopTokenIds = this.#stopTokenIds(name);
        const createdSeconds = entry.model?.createdSeconds ?? Math.floor(Date.now() / 1000);
        const { text: model } = entry;
        const { maxModelTokens } = model;
        entry.model = { name, text: { ...loaded, model }, maxModelTokens, stopTokenIds, createdSeconds };
        entry.problem = undefined;
        if (loaded.chatProblem !== undefined) logger.warn({ model: name, code: 'MODEL' }, loaded.chatProblem);
        this.#version++;
        this.#changed();
        return;
      } catch (error) {
        const problem = KvError.from(error);
        if (entry.problem?.message !== problem.message)
          logger.warn({ model: name, code: problem.code }, problem.message);
        entry.problem = problem;
        entry.model = undefined;
        this.#version++;
        this.#changed();
      }
      await sleep(againMs, undefined, { signal: this.#closing.signal, ref: false }).catch(() => {});
    }
  }

  #textModel({ record }: Worker, facts: WorkerFacts): TextModel {
    const { model: name, vocabSize } = facts;
    // Of files that we are told to use instead, workers say nothing.
    const textDigest = facts.modelDir === '' ? undefined : facts.textDigest;
    const isPassedOn = record.kind === 'openai';
    const { tokenizers } = this.#options;
    const configured = Object.hasOwn(tokenizers, name) ? tokenizers[name]! : ''; // workers name their models as they like
    const modelDir = facts.modelDir === '' ? configured : facts.modelDir;
    const maxModelTokens = isPassedOn ? facts.maxModelTokens : Math.min(facts.maxModelTokens, this.#poolTokens(name));
    return { name, modelDir, textDigest, maxModelTokens, vocabSize, blocks: namesOf(facts, isPassedOn), isPassedOn };
  }

  /** Bodies are read or passed on: requests of a model never go to workers of both kinds. */
  #amongOf({ name, isPassedOn }: TextModel): ReadonlySet<string> | undefined {
    const wanted = new Set<string>();
    let others = 0;
    for (const worker of this.#options.engines.workers()) {
      if (worker?.facts?.model !== name) continue;
      if ((worker.record.kind === 'openai') === isPassedOn) wanted.add(worker.record.name);
      else others++;
    }
    return others === 0 ? undefined : wanted;
  }

  /** Of one sequence, that the largest pool of its own workers holds; of one that does not say, all. Who prefills alone holds no answer. */
  #poolTokens(name: string): number {
    const own = this.#options.engines
      .workers()
      .filter(
        (worker) => worker?.facts?.model === name && worker.record.kind === 'kvtier' && worker.state !== 'refused',
      );
    const whole = own.filter((worker) => worker!.record.role !== 'prefill');
    const pools = (whole.length > 0 ? whole : own).map((worker) => worker!.facts!.maxTotalTokens);
    return pools.reduce<number>((most, pool = Number.POSITIVE_INFINITY) => Math.max(most, pool), 1);
  }

  #stopTokenIds(name: string): readonly number[] {
    for (const worker of this.#options.engines.workers())
      if (worker?.facts?.model === name && worker.record.kind === 'kvtier') return worker.facts.stopTokenIds;
    return [];
  }
}

/** What pods tell of their blocks is translated to these names, however they hash. */
function namesOf({ blockTokens, hashAlgorithm, hashSeed }: WorkerFacts, isPassedOn: boolean): BlockNames | undefined {
  if (blockTokens <= 0) return undefined;
  if (isPassedOn) return { blockTokens, algorithm: 'sha256_cbor', seed: defaultRootSeed };
  return hashAlgorithm === '' ? undefined : { blockTokens, algorithm: hashAlgorithm, seed: hashSeed };
}

const isSame = (a: TextModel, b: TextModel): boolean =>
  a.modelDir === b.modelDir &&
  a.textDigest === b.textDigest &&
  a.vocabSize === b.vocabSize &&
  a.isPassedOn === b.isPassedOn &&
  a.blocks?.blockTokens === b.blocks?.blockTokens &&
  a.blocks?.algorithm === b.blocks?.algorithm &&
  a.blocks?.seed === b.blocks?.seed;

/** Why no request can be served, of workers that have said nothing of themselves. */
function nobody(workers: readonly (Worker | undefined)[]): KvError {
  const known = workers.filter((worker) => worker !== undefined);
  const line =
    known.length === 0
      ? 'engine: no worker is known; add one, or wait for discovery'
      : (whyOf(known) ?? `engine: ${known.length} workers are known and none is reached yet; try again in a moment`);
  return new KvError('DISCONNECTED', line, { retry: true });
}

/** Of workers none of which serves: what stands in the way, of one that was refused before all others, for it does not mend itself. */
export const whyOf = (workers: readonly Worker[]): string | undefined =>
  (workers.find(({ state }) => state === 'refused') ?? workers.find(({ why }) => why !== undefined))?.why;
