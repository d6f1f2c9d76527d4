/**
 * All workers of the cluster as this coordinator sees them: discovery says who may be asked, a line to each says whether it lives,
 * what it is and what it has to do, and requests go to it over that line.
 *
 *     Discovery ──Membership──▶ Fleet ──▶ member (a number, a record) ──▶ line: kvtier (gRPC) or openai (HTTP)
 *
 * Invariants: a worker gets requests only while it answers, says what can be, and agrees with the others of its model; what is wrong with
 * one disturbs no other. One that discovery drops, and that still answers, ends what it has first. At most `maxWorkers` are known. A number
 * stands for nobody else while a request may still mean who had it: a choice is a number, and what is done about it may take a while.
 */
import { randomBytes } from 'node:crypto';
import type { Membership, WorkerRecord } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { Logger } from '@kvtier/telemetry';
import type { GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import type { Discovery } from './discovery.ts';
import type { EngineCalls, OnEvent } from './engine-calls.ts';
import { LineTurns } from './line-turns.ts';
import { type Access, type LinkTimes, linkTimes } from './link.ts';
import { usualLoads } from './load-rates.ts';
import { type FleetCounts, Member, type MemberHost } from './member.ts';
import { openLink } from './open-link.ts';
import type { Forwarded } from './pod-requests.ts';
import type { Share } from './sent-ledger.ts';
import { StepLine } from './step-line.ts';
import type { Leaning, Sent, Worker, WorkerFacts } from './worker.ts';

/** Names of the KV index's media by their numbers, as engines name the tiers of their loads. */
export const tierMedia: readonly string[] = ['gpu', 'arena', 'disk', 'peer', 'redis', 's3'];

export interface FleetOptions {
  readonly logger: Logger;
  /** How workers beyond loopback are reached; without it they are refused. */
  readonly access?: Access;
  readonly times?: Partial<LinkTimes>;
  /** Workers at most; more are left out, with a line. */
  readonly maxWorkers?: number;
  readonly media?: readonly string[];
  /** Prompt tokens a second of a worker while no worker of its model has measured any. */
  readonly guessedPrefillTokensPerS?: number;
}

/** Longer than the legs of one request take, unless far longer ones are configured. */
const freeMs = 600_000;
/** Numbers at most, for each worker that there may be: many that come and go share what time there is. */
const numbersPerWorker = 4;

export class Fleet {
  readonly counts: FleetCounts = { ready: 0, lost: 0, refused: 0, restarted: 0 };
  readonly #options: FleetOptions;
  readonly #times: LinkTimes;
  readonly #maxWorkers: number;
  /** Who this coordinator is, in this life. */
  readonly #sender = randomBytes(8).toString('hex');
  readonly #members = new Map<string, Member>();
  readonly #lines = new LineTurns();
  readonly #listeners = new Set<() => void>();
  readonly #loadListeners = new Set<() => void>();
  #byNumber: (Member | undefined)[] = [];
  /** By model, until somebody tells his load. */
  readonly #usualRates = new Map<string, number>();
  readonly #usualSteps = new Map<string, number>();
  readonly #usualLoads = new Map<string, readonly number[]>();
  /** In the order in which they came free. */
  readonly #freeNumbers: { readonly number: number; readonly atMs: number }[] = [];
  #discovery: Discovery | undefined;
  #problem: string | undefined;
  #nodes: Membership['nodes'] = [];
  #isListed = false;
  #isEnding = false;
  #closed = false;

  constructor(options: FleetOptions) {
    this.#options = options;
    this.#times = { ...linkTimes, ...options.times };
    this.#maxWorkers = options.maxWorkers ?? 1_024;
  }

  /** Follows this discovery from now on, once. @throws KvError CONFIG: what can never work */
  async start(discovery: Discovery): Promise<void> {
    this.#discovery = discovery;
    await discovery.start({
      changed: (members) => this.#apply(members),
      problem: (why) => {
        if (why !== undefined && why !== this.#problem) this.#options.logger.warn({ discovery: discovery.kind }, why);
        if (why === undefined && this.#problem !== undefined)
          this.#options.logger.info({ discovery: discovery.kind }, 'discovery is up to date again');
        this.#problem = why;
      },
    });
  }

  /** Why who is known may be old; undefined: it is not. */
  get discoveryProblem(): string | undefined {
    return this.#problem;
  }

  /** Discovery has said who is there, once at least. */
  get isListed(): boolean {
    return this.#isListed;
  }

  /** By number, with holes. Each is live: its state and load are those of the moment they are read. */
  workers(): readonly (Worker | undefined)[] {
    return this.#byNumber;
  }

  /** Cache nodes that discovery knows. */
  nodes(): Membership['nodes'] {
    return this.#nodes;
  }

  /** Told after workers came, went, or changed in state, record or facts; not of their load. Returns how to stop it. */
  onChange(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** Told at each word of a worker's load: up to fifty times a second for each, so it does little. Returns how to stop it. */
  onLoad(listener: () => void): () => void {
    this.#loadListeners.add(listener);
    return () => this.#loadListeners.delete(listener);
  }

  /** A request was chosen for this worker: counted from now on, until it has ended. One that has left counts nothing. */
  sent(number: number, share: Share): Sent {
    return this.#byNumber[number]?.link?.send(share) ?? nothing;
  }

  /** A request goes to this worker by another way than through `forward`. What becomes of it is told here, too. */
  went(number: number): void {
    this.#byNumber[number]?.link?.went?.();
  }

  /** Something of its answer has just come: the worker lives. */
  heard(number: number): void {
    this.#byNumber[number]?.link?.heard?.();
  }

  /** It is answered well. */
  succeeded(number: number): void {
    this.#byNumber[number]?.link?.succeeded?.();
  }

  /** It failed there. `why`: a few words. */
  failed(number: number, why: string): void {
    this.#byNumber[number]?.link?.failed?.(why);
  }

  /** It failed there or on its way: the worker is asked whether it is well. */
  doubted(number: number): void {
    this.#byNumber[number]?.link?.doubted?.();
  }

  /** What this worker, of role `both`, is for from now on; what it has goes on as it is. One that has left leans nowhere. */
  lean(number: number, leaning: Leaning | undefined): void {
    this.#byNumber[number]?.lean(leaning);
  }

  /**
   * One request to a `kvtier` worker; its events as they come, the last with a finish reason. Leaving the loop, or `signal`, cancels it.
   * @throws KvError (DISCONNECTED: the worker has left, is lost or drains; to be tried elsewhere), or the reason of `signal`
   */
  generate(number: number, request: GenerateRequest, signal: AbortSignal): AsyncGenerator<GenerateEvent, void, void> {
    return this.#of(number, 'kvtier').kvtier!.generate(request, signal);
  }

  /**
   * One request to a `kvtier` worker: `onEvent` is told each event as it comes, the last with a finish reason; a promise that it returns
   * holds the worker's stream back, false ends it. @throws KvError (DISCONNECTED: the worker has left, is lost or drains; to be tried
   * elsewhere), what `onEvent` threw, or the reason of `signal`
   */
  async follow(number: number, request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void> {
    await this.#of(number, 'kvtier').kvtier!.follow(request, signal, onEvent);
  }

  /** The other calls of a `kvtier` worker: its metrics, its cache, its pins. @throws KvError DISCONNECTED: it has left */
  engine(number: number): Omit<EngineCalls, 'generate' | 'follow' | 'watchLoad' | 'cut' | 'close'> {
    return this.#of(number, 'kvtier').kvtier!.calls;
  }

  /**
   * One HTTP request to an `openai` worker, whose answer streams back as it comes. `signal` ends both.
   * @throws KvError DISCONNECTED (nothing was answered; to be tried elsewhere), DEADLINE, or the reason of `signal`
   */
  forward(
    number: number,
    path: string,
    headers: Readonly<Record<string, string>>,
    body: Uint8Array | string,
    signal: AbortSignal,
  ): Promise<Forwarded> {
    return this.#of(number, 'openai').openai!.forward(path, headers, body, signal);
  }

  /** This coordinator is about to close: workers that end beside it are no trouble. */
  ending(): void {
    this.#isEnding = true;
  }

  async close(): Promise<void> {
    this.#closed = true;
    this.#listeners.clear();
    this.#loadListeners.clear();
    const ends: Promise<void>[] = [];
    for (const member of this.#members.values()) this.#lines.add(member, () => void ends.push(member.close()));
    this.#members.clear();
    this.#byNumber = [];
    await this.#discovery?.close();
    await this.#lines.done();
    await Promise.all(ends);
  }

  #of(number: number, kind: WorkerRecord['kind']): Member {
    const member = this.#byNumber[number];
    if (member?.record.kind === kind && member.link !== undefined) return member;
    throw new KvError('DISCONNECTED', `worker number ${number}: has left; try again`, { retry: true });
  }

  #apply({ workers, nodes }: Membership): void {
    if (this.#closed) return;
    const { logger } = this.#options;
    this.#isListed = true;
    this.#nodes = nodes;
    const kept = workers.slice(0, this.#maxWorkers);
    if (kept.length < workers.length) {
      const left = `${workers.length - kept.length} workers beyond ${this.#maxWorkers} are left out`;
      const mend = `a coordinator knows ${this.#maxWorkers} at most: give the others a coordinator of their own`;
      logger.warn({ discovery: this.#discovery?.kind }, `fleet: ${left}; ${mend}`);
    }
    const records = new Map<string, WorkerRecord>();
    for (const record of kept) {
      const plain = `${record.name} ${record.kind} ${record.address}`;
      let key = plain;
      for (let again = 2; records.has(key); again++) key = `${plain} (${again})`;
      records.set(key, record);
    }
    // Who goes, before who comes: a name may move to another address.
    const freed: Member[] = [];
    for (const [key, member] of this.#members) {
      if (records.has(key)) continue;
      member.leave();
      if (!member.gone) continue;
      this.#remove(key, member);
      freed.push(member);
    }
    for (const [key, record] of records) {
      const member = this.#members.get(key);
      if (member) member.rename(record);
      else this.#add(key, record);
    }
    for (const member of freed) this.#free(member); // for those that come later: a policy hears first that the number is free
    this.#settleNames();
    this.#changed();
  }

  #add(key: string, record: WorkerRecord): void {
    const number = this.#nextNumber();
    const isEnding = (): boolean => this.#isEnding;
    const host: MemberHost = {
      get isEnding() {
        return isEnding();
      },
      changed: () => this.#changed(),
      told: () => {
        this.#forgetUsual();
        for (const listener of this.#loadListeners) listener();
      },
      conflict: (member, facts) => this.#conflict(member, facts),
      usualPrefillTokensPerS: (member) => this.#usualPrefillTokensPerS(member),
      usualStepPerRequestS: (member) => this.#usualStepPerRequestS(member),
      usualLoadBlocksPerS: (member) => this.#usualLoadBlocksPerS(member),
      maySpare: (member) => this.#maySpare(member),
      counts: this.counts,
      startMs: this.#times.startMs,
      logger: this.#options.logger,
      left: (member) => {
        if (this.#members.get(key) !== member) return;
        this.#remove(key, member);
        this.#settleNames();
        this.#changed();
        this.#free(member);
      },
    };
    const member = new Member(number, record, host);
    this.#members.set(key, member);
    this.#byNumber[number] = member;
  }

  #remove(key: string, member: Member): void {
    this.#members.delete(key);
    this.#byNumber[member.number] = undefined;
    this.#lines.add(member, () => void member.close());
  }

  #free({ number }: Member): void {
    this.#freeNumbers.push({ number, atMs: performance.now() });
  }

  #nextNumber(): number {
    const next = this.#byNumber.length;
    const [oldest] = this.#freeNumbers;
    if (oldest === undefined) return next;
    if (performance.now() - oldest.atMs < freeMs && next < numbersPerWorker * this.#maxWorkers) return next;
    this.#freeNumbers.shift();
    return oldest.number;
  }

  /** Of several workers of one name the first that came has it, until it goes. */
  #settleNames(): void {
    const { access, media = tierMedia } = this.#options;
    const owners = new Map<string, Member>();
    for (const member of this.#members.values())
      if (member.link && !member.leaving) owners.set(member.record.name, member);
    for (const member of this.#members.values()) {
      if (member.link) continue;
      const { name, address } = member.record;
      const owner = owners.get(name);
      if (owner) {
        // It may have had the name while the owner was leaving, and wait for its line since.
        this.#lines.drop(member);
        const taken = `is the name of the worker at ${owner.record.address} already`;
        member.refuse(`worker ${name} at ${address}: ${taken}; give each worker a name of its own`);
        continue;
      }
      owners.set(name, member);
      this.#lines.add(member, () =>
        member.open((host) =>
          openLink({ record: member.record, host, sender: this.#sender, times: this.#times, media, access }),
        ),
      );
    }
  }

  #conflict(member: Member, facts: WorkerFacts): string | undefined {
    for (const other of this.#members.values()) {
      if (other === member) continue;
      const why = other.conflictWith(member.record.name, facts);
      if (why !== undefined) return why;
    }
    return undefined;
  }

  /** Of all that have measured: who asks has not, or is slower than the mean and has not for a while. */
  #usualPrefillTokensPerS(of: Member): number {
    const model = of.facts?.model ?? '';
    let usual = this.#usualRates.get(model);
    if (usual === undefined) {
      let sum = 0;
      let measured = 0;
      for (const member of this.#members.values()) {
        const rate = member.measuredPrefillTokensPerS;
        if (rate === 0 || member.facts?.model !== model) continue;
        sum += rate;
        measured++;
      }
      usual = measured === 0 ? (this.#options.guessedPrefillTokensPerS ?? 2_000) : sum / measured;
      this.#usualRates.set(model, usual);
    }
    return usual;
  }

  #maySpare({ record, facts }: Member): boolean {
    for (const other of this.#members.values()) {
      if (other.record.name === record.name || other.state !== 'ready' || other.isFailing) continue;
      const { role } = other.record;
      if (other.facts?.model === facts?.model && (role === record.role || role === 'both')) return true;
    }
    return false;
  }

  #usualStepPerRequestS(of: Member): number {
    const model = of.facts?.model ?? '';
    let usual = this.#usualSteps.get(model);
    if (usual === undefined) {
      const lines: StepLine[] = [];
      for (const { facts, stepLine } of this.#members.values())
        if (stepLine !== undefined && facts?.model === model) lines.push(stepLine);
      usual = StepLine.slopeOf(lines);
      this.#usualSteps.set(model, usual);
    }
    return usual;
  }

  #usualLoadBlocksPerS(of: Member): readonly number[] {
    const model = of.facts?.model ?? '';
    let usual = this.#usualLoads.get(model);
    if (usual === undefined) {
      const { media = tierMedia } = this.#options;
      const rates: (readonly number[])[] = [];
      for (const member of this.#members.values())
        if (member.facts?.model === model) rates.push(member.measuredLoadBlocksPerS);
      usual = usualLoads(media.length, rates);
      this.#usualLoads.set(model, usual);
    }
    return usual;
  }

  #forgetUsual(): void {
    this.#usualRates.clear();
    this.#usualSteps.clear();
    this.#usualLoads.clear();
  }

  #changed(): void {
    this.#forgetUsual();
    if (this.#closed) return;
    for (const listener of [...this.#listeners]) listener();
  }
}

const nothing: Sent = { firstToken: () => {}, ended: () => {} };
