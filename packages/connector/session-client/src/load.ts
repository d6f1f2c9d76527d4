/**
 * One load: Ready ranges come in chain order, their blocks are copied into the KV cache as they come, and each is
 * verified while it is copied.
 *
 *      announced by the node   ├──────────────────────────┤        `#ready`
 *      copy started            ├─────────────────┤                 `#started`
 *      copied and verified     ├──────────┤                        the result, when it ends
 *
 * Where all of it is announced at once, it may be offered instead: to be imported with a step, layer by layer (`ArrivedLoad`).
 * What comes from slower tiers comes more slowly than the bus, and is copied as it comes.
 *
 * Of a load of what another engine computes meanwhile (`awaited`), the node announces each block as soon as somebody holds it. It
 * ends when nothing more has come for a while, at its own deadline, or early (`limit`): what was announced until then is used.
 *
 * Invariants: the result is a prefix, and every block of it matched its checksum on arrival, so that a node that died
 * or lied in the middle costs time but never truth. It ends once, and only when no copy runs any more: the blocks are
 * the scheduler's again. Whatever the node leased is released.
 */
import { KvError } from '@kvtier/errors';
import type { Executor, StepResult } from '@kvtier/executor';
import type { ArrivedLoad, AwaitedLoad } from '@kvtier/scheduler';
import { type ConnectorCounters, count } from './counters.ts';
import type { Session } from './session-client.ts';
import type { Answer } from './session-link.ts';
import type { Timers } from './timers.ts';

export interface LoadContext {
  readonly session: Session;
  readonly executor: Pick<Executor, 'importBlocks'>;
  readonly timers: Timers;
  readonly counters: ConnectorCounters;
  /** Blocks were copied, just now; the copy was asked for at `startedAtMs`. */
  onCopied(blocks: number, startedAtMs: number): void;
  /** undefined: it is waited for until its deadline. */
  readonly judge?: LoadJudge | undefined;
  /** All blocks lie in the arena at once: true when a step will import them. */
  readonly onArrived?: ((load: ArrivedLoad) => boolean) | undefined;
  /** Blocks that nobody holds yet are waited for. */
  readonly awaited?: AwaitedLoad | undefined;
}

/** Whether to go on waiting for a load that is slower than was thought. */
export interface LoadJudge {
  /** First asked then, and each time that blocks come; undefined: not before some have come. */
  readonly afterMs: number | undefined;
  goOn(ready: number, elapsedMs: number): boolean;
  /** The first block came. */
  began(elapsedMs: number): void;
}

export interface LoadOutcome {
  /** Blocks from the first on. */
  readonly loaded: number;
  /** Where each of them came from. */
  readonly tiers: readonly string[];
  /** A step imported them: how long that took says nothing about the copy. */
  readonly withStep: boolean;
  /** Its judge would not go on. */
  readonly isGivenUp: boolean;
  /** Why it came short; '' when it did not. */
  readonly reason: string;
}

/** The node ends a load at its deadline by itself; this much later we do. */
const graceMs = 25;
/** Copies at a time: one runs while the next is prepared; what is announced meanwhile travels together. */
const maxCopies = 2;
const releaseDeadlineMs = 5_000;
/** Nobody waits for the answer; it only says that the node is alive. */
const endDeadlineMs = 1_000;

export class LoadRun {
  readonly #context: LoadContext;
  readonly #blockIds: Int32Array;
  readonly #onEnd: (outcome: LoadOutcome) => void;
  readonly #offsets: Float64Array;
  readonly #checksums: BigUint64Array;
  readonly #tiers: string[] = [];
  readonly #verified: Uint8Array;
  readonly #corrupt: number[] = [];
  #loadId: bigint | undefined;
  /** The node's lease may exist. */
  #leased = false;
  #ready = 0;
  #started = 0;
  /** Copied and good, from the first on. */
  #came = 0;
  /** Copies that run, and an offer that is not decided. */
  #copies = 0;
  #withStep = false;
  /** No more Ready is taken. */
  #closed = false;
  /** No more copies are started either. */
  #halted = false;
  #ended = false;
  readonly #beganMs: number;
  #cancelJudge = (): void => {};
  #cancelStall = (): void => {};
  /** As soon as so many blocks are announced, nothing more is waited for. */
  #limit: number;
  #isGivenUp = false;
  #reason = '';

  /** @param hashes of the blocks to load, packed; `onEnd` is never called from in here */
  constructor(
    context: LoadContext,
    hashes: Buffer,
    blockIds: Int32Array,
    deadlineMs: number,
    onEnd: (outcome: LoadOutcome) => void,
  ) {
    this.#context = context;
    this.#blockIds = blockIds;
    this.#onEnd = onEnd;
    this.#offsets = new Float64Array(blockIds.length);
    this.#checksums = new BigUint64Array(blockIds.length);
    this.#verified = new Uint8Array(blockIds.length);
    this.#beganMs = context.timers.nowMs();
    if (context.judge?.afterMs !== undefined) this.#judgeIn(context.judge.afterMs);
    this.#limit = blockIds.length;
    const { awaited } = context;
    const value = awaited ? { hashes, deadlineMs, awaitMs: awaited.stallMs } : { hashes, deadlineMs };
    const sent = context.session.link.send({ $case: 'load', value }, deadlineMs + graceMs, {
      onAnswer: (answer) => this.#answered(answer),
      onFailure: (error) => {
        if (error.code !== 'DEADLINE') this.#leased = false;
        this.#close(error.code.toLowerCase(), true);
      },
    });
    if (sent instanceof KvError) {
      queueMicrotask(() => this.#close(sent.code.toLowerCase(), true));
    } else {
      this.#loadId = sent;
      this.#leased = true;
      this.#watchStall();
    }
  }

  /** It ends as soon as its first `blocks` blocks are announced: at once, when they are, but not from inside. The last word counts. */
  limit(blocks: number): void {
    this.#limit = Math.min(blocks, this.#blockIds.length);
    if (this.#ready >= this.#limit && this.#ready < this.#blockIds.length) this.#endEarly('changed');
  }

  /** Nobody wants it any more: it ends as soon as no copy runs. Never from inside. */
  stop(): void {
    this.#halted = true; // also where all is announced already
    this.#endEarly('request ended');
  }

  /** The node ends an awaited load by itself when nothing comes; a little later we do. */
  #watchStall(): void {
    const { awaited, timers } = this.#context;
    if (!awaited || this.#closed) return;
    this.#cancelStall();
    this.#cancelStall = timers.after(awaited.stallMs + graceMs, () => this.#endEarly('awaited'));
  }

  /** The node stops waiting; what it announced is used, and nobody waits for its answer. */
  #endEarly(reason: string): void {
    const { link } = this.#context.session;
    const loadId = this.#loadId;
    if (this.#closed) return;
    const heard = { onAnswer: () => {}, onFailure: () => {} };
    if (loadId !== undefined) link.send({ $case: 'endLoad', value: { loadId } }, endDeadlineMs, heard, true);
    this.#shut(reason);
    // Who ended it is at work with what it waits for, or with the other groups of this load.
    queueMicrotask(() => this.#pump());
  }

  #answered(answer: Answer): void {
    if (answer.$case === 'loadDone') {
      this.#close(answer.value.reason);
      return;
    }
    try {
      if (answer.$case !== 'ready') throw new KvError('PROTOCOL', `a load was answered with ${answer.$case}`);
      const { first, offsets, checksums, tier } = answer.value;
      if (this.#closed) return;
      if (
        first !== this.#ready ||
        offsets.length !== checksums.length ||
        first + offsets.length > this.#offsets.length
      ) {
        throw new KvError('PROTOCOL', `the cache node announced blocks ${first} + ${offsets.length} out of order`);
      }
      const { judge, timers } = this.#context;
      if (first === 0 && offsets.length > 0) judge?.began(timers.nowMs() - this.#beganMs);
      this.#offsets.set(this.#context.session.offsets(offsets), first);
      for (let i = 0; i < checksums.length; i++) {
        this.#checksums[first + i] = checksums[i]!;
        this.#tiers[first + i] = tier;
      }
      this.#ready += offsets.length;
      this.#pump();
      this.#watchStall();
      this.limit(this.#limit);
      this.#judge();
    } catch (error) {
      this.#context.session.link.end(KvError.from(error, 'PROTOCOL'));
      this.#close('protocol', true);
    }
  }

  #judgeIn(ms: number): void {
    this.#cancelJudge = this.#context.timers.after(ms, () => {
      this.#judge();
      if (!this.#closed && this.#ready < this.#blockIds.length) this.#judgeIn(ms);
    });
  }

  /** What the node announced is used; it goes on bringing what it has begun to, for the next who asks. */
  #judge(): void {
    const { judge, timers } = this.#context;
    if (judge === undefined || this.#closed || this.#ready === this.#blockIds.length) return;
    if (judge.goOn(this.#ready, timers.nowMs() - this.#beganMs)) return;
    this.#isGivenUp = true;
    this.#close('slower than computing');
  }

  #pump(): void {
    if (this.#copies < maxCopies && this.#started < this.#ready && !this.#halted) {
      const first = this.#started;
      this.#started = this.#ready;
      if (first > 0 || this.#ready < this.#blockIds.length || !this.#offer()) void this.#copy(first, this.#started);
    }
    if (this.#copies > 0 || this.#ended) return;
    // All is here and verified: what the node has to say yet changes nothing, and may be long in coming.
    if (this.#came === this.#blockIds.length) this.#shut('');
    if (this.#closed) this.#end();
  }

  /** True when it was taken: it counts as a copy until it is decided. */
  #offer(): boolean {
    const { session, onArrived } = this.#context;
    if (!onArrived) return false;
    const { link, arena } = session;
    const [blockIds, offsets, checksums] = [this.#blockIds, this.#offsets, this.#checksums];
    this.#copies++;
    const taken = onArrived({
      blocks: { arena, blockIds, offsets, checksums },
      get live() {
        return link.alive;
      },
      import: (step) => this.#importWith(step),
      decline: () => {
        this.#copies--;
        if (this.#halted) this.#pump();
        else void this.#copy(0, this.#started);
      },
    });
    if (!taken) this.#copies--;
    return taken;
  }

  async #importWith(step: () => Promise<StepResult>): Promise<StepResult> {
    this.#withStep = true;
    try {
      const result = await this.#context.session.copy(step);
      if (result.imported) this.#verdicts(result.imported, 0);
      else this.#fail('not imported');
      return result;
    } catch (error) {
      this.#fail(KvError.from(error).code.toLowerCase());
      throw error;
    } finally {
      this.#copies--;
      this.#pump();
    }
  }

  #verdicts(flags: Uint8Array, first: number): void {
    this.#verified.set(flags, first);
    for (let i = 0; i < flags.length; i++) if (flags[i] !== 1) this.#corrupt.push(first + i);
    if (this.#corrupt.length > 0) this.#fail('checksum');
    const before = this.#came;
    while (this.#verified[this.#came] === 1) this.#came++;
    // That the last ones came, the end says.
    if (this.#came > before && this.#came < this.#verified.length) this.#context.awaited?.onCame?.(this.#came);
  }

  async #copy(first: number, end: number): Promise<void> {
    const { session, executor, timers } = this.#context;
    this.#copies++;
    const startedAtMs = timers.nowMs();
    try {
      const flags = await session.copy(() =>
        executor.importBlocks(
          session.arena,
          this.#blockIds.slice(first, end),
          this.#offsets.slice(first, end),
          this.#checksums.slice(first, end),
        ),
      );
      this.#context.onCopied(end - first, startedAtMs);
      this.#verdicts(flags.subarray(0, end - first), first);
    } catch (error) {
      this.#fail(KvError.from(error).code.toLowerCase());
    }
    this.#copies--;
    this.#pump();
  }

  /** The end is near; `reason` is "" when the node brought everything. Copies that run are waited for. */
  #close(reason: string, halt = false): void {
    this.#shut(reason);
    this.#halted ||= halt;
    this.#pump();
  }

  #shut(reason: string): void {
    if (!this.#closed && reason !== '') this.#shortBy(reason);
    this.#closed = true;
    this.#cancelJudge();
    this.#cancelStall();
  }

  /** Ours, not the node's: it may have said already that all is well. */
  #fail(reason: string): void {
    if (!this.#halted) this.#shortBy(reason);
    this.#close('', true);
  }

  #shortBy(reason: string): void {
    count(this.#context.counters, 'load', reason);
    this.#reason ||= reason;
  }

  #end(): void {
    this.#ended = true;
    const gap = this.#verified.indexOf(0);
    const loaded = gap < 0 ? this.#verified.length : gap;
    const reason = loaded < this.#verified.length ? this.#reason : '';
    this.#onEnd({
      loaded,
      tiers: this.#tiers.slice(0, loaded),
      withStep: this.#withStep,
      isGivenUp: this.#isGivenUp,
      reason,
    });
    // When what the blocks were waited for has begun, or was told: nobody waits for this.
    setImmediate(() => this.#release());
  }

  #release(): void {
    const loadId = this.#loadId;
    if (loadId === undefined || !this.#leased) return;
    const { link } = this.#context.session;
    const corrupt = this.#corrupt.sort((a, b) => a - b);
    const settled = (): void => link.forget(loadId);
    link.send(
      { $case: 'release', value: { loadId, corrupt } },
      releaseDeadlineMs,
      {
        onAnswer: settled,
        onFailure: settled,
        onLate: settled,
      },
      true,
    );
  }
}
