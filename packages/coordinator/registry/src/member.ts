/** One worker of the fleet: its number, its record, and what its line has told of it. */
import type { WorkerRecord } from '@kvtier/config';
import type { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import { conflictOf } from './facts.ts';
import { KvtierLink } from './kvtier-link.ts';
import { type Link, type LinkHost, noLoad } from './link.ts';
import { OpenaiLink } from './openai-link.ts';
import type { StepLine } from './step-line.ts';
import type { Leaning, Worker, WorkerFacts, WorkerLoad, WorkerState } from './worker.ts';

/** What happened to workers, since the start. */
export interface FleetCounts {
  ready: number;
  lost: number;
  refused: number;
  restarted: number;
}

/** What a member asks of the fleet. */
export interface MemberHost {
  readonly logger: Logger;
  readonly counts: FleetCounts;
  /** This coordinator ends: that workers are lost is no trouble. */
  readonly isEnding: boolean;
  /** `LinkTimes.startMs`. */
  readonly startMs: number;
  changed(): void;
  /** Its load came. */
  told(): void;
  /** Why a worker with these facts cannot stand beside the others. */
  conflict(member: Member, facts: WorkerFacts): string | undefined;
  usualPrefillTokensPerS(member: Member): number;
  usualStepPerRequestS(member: Member): number;
  /** Of its model, by medium; 0: none has measured it. */
  usualLoadBlocksPerS(member: Member): readonly number[];
  maySpare(member: Member): boolean;
  /** It was dropped by discovery, and has nothing left to do. */
  left(member: Member): void;
}

export class Member implements Worker {
  readonly number: number;
  readonly #host: MemberHost;
  #record: WorkerRecord;
  #link: Link | undefined;
  #state: WorkerState = 'joining';
  #why: string | undefined;
  #facts: WorkerFacts | undefined;
  /** It was found to agree with the others, and is there: they agree with it. */
  #standing = false;
  /** The worker's own word. */
  #draining = false;
  /** Dropped by discovery. */
  #leaving = false;
  #logged: string | undefined;
  readonly #sinceMs = performance.now();
  #leaning: Leaning | undefined;
  #awaySinceMs: number | undefined = this.#sinceMs;
  /** Why it gets nothing new though it answers. */
  #resting: string | undefined;
  #restingSinceMs: number | undefined;

  constructor(number: number, record: WorkerRecord, host: MemberHost) {
    this.number = number;
    this.#record = record;
    this.#host = host;
  }

  get record(): WorkerRecord {
    return this.#record;
  }

  get state(): WorkerState {
    const drains = this.#draining || this.#leaving || this.#record.draining;
    if (this.#state !== 'ready') return this.#state;
    if (drains) return 'draining';
    return this.#resting === undefined ? 'ready' : 'silent';
  }

  get why(): string | undefined {
    return this.#why ?? this.#resting;
  }

  get awaySinceMs(): number | undefined {
    return this.#leaving || this.#record.draining ? undefined : (this.#awaySinceMs ?? this.#restingSinceMs);
  }

  get facts(): WorkerFacts | undefined {
    return this.#facts;
  }

  get load(): WorkerLoad {
    return this.#link?.load() ?? noLoad;
  }

  get prefillRate(): 'measured' | 'assumed' {
    return (this.#link?.measuredPrefillTokensPerS ?? 0) > 0 ? 'measured' : 'assumed';
  }

  /** The last of its requests failed. */
  get isFailing(): boolean {
    return this.#link?.isFailing ?? false;
  }

  get leaning(): Leaning | undefined {
    return this.#leaning;
  }

  lean(leaning: Leaning | undefined): void {
    if (this.#leaning === leaning) return;
    this.#leaning = leaning;
    this.#host.changed();
  }

  get link(): Link | undefined {
    return this.#link;
  }

  get kvtier(): KvtierLink | undefined {
    return this.#link instanceof KvtierLink ? this.#link : undefined;
  }

  get openai(): OpenaiLink | undefined {
    return this.#link instanceof OpenaiLink ? this.#link : undefined;
  }

  /** 0: it has not measured, or is not there. */
  get measuredPrefillTokensPerS(): number {
    return this.#state === 'ready' ? (this.#link?.measuredPrefillTokensPerS ?? 0) : 0;
  }

  /** Of a pod. */
  get stepLine(): StepLine | undefined {
    return this.#state === 'ready' ? this.#link?.stepLine : undefined;
  }

  /** By medium. */
  get measuredLoadBlocksPerS(): readonly number[] {
    return this.#state === 'ready' ? (this.#link?.measuredLoadBlocksPerS ?? []) : [];
  }

  /** Discovery says something else of the same worker. */
  rename(record: WorkerRecord): void {
    this.#record = record;
    this.#leaving = false;
  }

  /** Discovery knows it no more: it ends what it has. */
  leave(): void {
    this.#leaving = true;
  }

  /** Discovery has dropped it, and it ends what it has: its name is free. */
  get leaving(): boolean {
    return this.#leaving;
  }

  /** Nothing of it is left to wait for. */
  get gone(): boolean {
    return this.#leaving && (this.#state !== 'ready' || (this.#link?.open ?? 0) === 0);
  }

  refuse(why: string): void {
    this.#to('refused', why);
  }

  /** Tried anew whenever members change: one that is refused for the same reason again is told and counted once. */
  open(open: (host: LinkHost) => Link): void {
    let link: Link;
    try {
      link = open(this.#linkHost());
    } catch (error) {
      this.refuse((error as Error).message);
      return;
    }
    this.#link = link;
    this.#to('joining', undefined);
    link.start();
  }

  async close(): Promise<void> {
    await this.#link?.close();
  }

  /** Why a worker of this name with these facts cannot stand beside this one. */
  conflictWith(name: string, facts: WorkerFacts): string | undefined {
    if (!this.#standing || this.#facts === undefined) return undefined;
    const { bootEpoch, model } = this.#facts;
    if (bootEpoch !== '' && bootEpoch === facts.bootEpoch)
      return `worker ${name}: is the same process as worker ${this.#record.name}; list it once`;
    return model === facts.model ? conflictOf(name, facts, this.#record.name, this.#facts) : undefined;
  }

  #linkHost(): LinkHost {
    return {
      described: (facts) => {
        const why = this.#host.conflict(this, facts);
        if (why !== undefined) return why;
        const before = this.#facts;
        if (before && before.bootEpoch !== facts.bootEpoch) this.#host.counts.restarted++;
        this.#facts = facts;
        this.#standing = true;
        if (this.#state === 'ready') this.#host.changed(); // it did not know all of it before
        return undefined;
      },
      answers: (draining) => {
        const changed = this.#draining !== draining;
        this.#draining = draining;
        this.#to('ready', undefined, changed);
        this.#host.told();
      },
      lost: (error) => {
        this.#draining = false;
        this.#standing = false;
        this.#to(this.#facts === undefined ? 'joining' : 'silent', lineOf(this.#record, error));
        if (this.gone) this.#host.left(this);
      },
      refused: (why) => {
        this.#draining = false;
        this.#standing = false;
        this.#to('refused', why);
        if (this.gone) this.#host.left(this);
      },
      ended: () => {
        if (this.gone) this.#host.left(this);
      },
      rests: (why) => this.#rest(why),
      maySpare: () => this.#host.maySpare(this),
      usualPrefillTokensPerS: () => this.#host.usualPrefillTokensPerS(this),
      usualStepPerRequestS: () => this.#host.usualStepPerRequestS(this),
      usualLoadBlocksPerS: () => (this.#record.node === null ? undefined : this.#host.usualLoadBlocksPerS(this)),
    };
  }

  #rest(why: string | undefined): void {
    if (this.#resting === why) return;
    this.#resting = why;
    this.#restingSinceMs = why === undefined ? undefined : (this.#restingSinceMs ?? performance.now());
    const { name: worker, address } = this.#record;
    if (why !== undefined) this.#host.logger.warn({ worker, address }, why);
    this.#host.changed();
  }

  #to(state: WorkerState, why: string | undefined, changed = false): void {
    const before = this.#state;
    if (state === 'ready' || state === 'refused') this.#awaySinceMs = undefined;
    else this.#awaySinceMs ??= performance.now();
    this.#tell(state, why);
    if (before === state && this.#why === why && !changed) return;
    this.#state = state;
    this.#why = why;
    const { counts, logger } = this.#host;
    const { name: worker, address } = this.#record;
    if (before !== state) {
      if (state === 'ready') counts.ready++;
      if (state === 'silent') counts.lost++;
      if (state === 'refused') counts.refused++;
    }
    if (state === 'ready' && before !== 'ready')
      logger.info({ worker, address, model: this.#facts?.model }, 'worker ready');
    this.#host.changed();
  }

  /** Once; that nobody answers yet is no trouble while the worker may still start. */
  #tell(state: WorkerState, why: string | undefined): void {
    if (why === undefined) this.#logged = undefined;
    const isStarting = state === 'joining' && performance.now() - this.#sinceMs < this.#host.startMs;
    if (why === undefined || why === this.#logged || isStarting) return;
    this.#logged = why;
    const { name: worker, address } = this.#record;
    this.#host.logger[this.#host.isEnding ? 'info' : 'warn']({ worker, address, state }, why);
  }
}

const lineOf = ({ name }: WorkerRecord, { message }: KvError): string =>
  message.startsWith(`worker ${name}`) ? message : `worker ${name}: ${message}`;
