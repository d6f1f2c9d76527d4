/**
 * One load: Ready ranges come in chain order, their blocks are copied into the KV cache as they come, and each is
 * verified while it is copied.
 *
 *      announced by the node   ├──────────────────────────┤        `#ready`
 *      copy started            ├─────────────────┤                 `#started`
 *      copied and verified     ├──────────┤                        the result, when it ends
 *
 * Invariants: the result is a prefix, and every block of it matched its checksum on arrival, so that a node that died
 * or lied in the middle costs time but never truth. It ends once, and only when no copy runs any more: the blocks are
 * the scheduler's again. Whatever the node leased is released.
 */
import { KvError } from '@kvtier/errors';
import type { Executor } from '@kvtier/executor';
import { type ConnectorCounters, count } from './counters.ts';
import type { Answer } from './link.ts';
import type { Session } from './session-client.ts';
import type { Timers } from './timers.ts';

export interface LoadContext {
  readonly session: Session;
  readonly executor: Pick<Executor, 'importBlocks'>;
  readonly timers: Timers;
  readonly counters: ConnectorCounters;
  /** Blocks copied, and how long the copy took. */
  onCopied(blocks: number, elapsedUs: number): void;
}

export interface LoadOutcome {
  /** Blocks from the first on. */
  readonly loaded: number;
  /** Where each of them came from. */
  readonly tiers: readonly string[];
}

/** The node ends a load at its deadline by itself; this much later we do. */
const graceMs = 25;
/** Copies at a time: one runs while the next is prepared; what is announced meanwhile travels together. */
const maxCopies = 2;
const releaseDeadlineMs = 5_000;

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
  #copies = 0;
  /** No more Ready is taken. */
  #closed = false;
  /** No more copies are started either. */
  #halted = false;
  #ended = false;

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
    const sent = context.session.link.send({ $case: 'load', value: { hashes, deadlineMs } }, deadlineMs + graceMs, {
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
    }
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
      this.#offsets.set(this.#context.session.offsets(offsets), first);
      for (const [i, checksum] of checksums.entries()) {
        this.#checksums[first + i] = checksum;
        this.#tiers[first + i] = tier;
      }
      this.#ready += offsets.length;
      this.#pump();
    } catch (error) {
      this.#context.session.link.end(KvError.from(error, 'PROTOCOL'));
      this.#close('protocol', true);
    }
  }

  #pump(): void {
    if (this.#copies < maxCopies && this.#started < this.#ready && !this.#halted) {
      const first = this.#started;
      this.#started = this.#ready;
      void this.#copy(first, this.#started);
    }
    if (this.#copies === 0 && this.#closed && !this.#ended) this.#end();
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
      this.#context.onCopied(end - first, (timers.nowMs() - startedAtMs) * 1_000);
      this.#verified.set(flags.subarray(0, end - first), first);
      for (let i = first; i < end; i++) if (this.#verified[i] !== 1) this.#corrupt.push(i);
      if (this.#corrupt.length > 0) this.#fail('checksum');
    } catch (error) {
      this.#fail(KvError.from(error).code.toLowerCase());
    }
    this.#copies--;
    this.#pump();
  }

  /** The end is near; `reason` is "" when the node brought everything. Copies that run are waited for. */
  #close(reason: string, halt = false): void {
    if (!this.#closed && reason !== '') count(this.#context.counters, 'load', reason);
    this.#closed = true;
    this.#halted ||= halt;
    this.#pump();
  }

  /** Ours, not the node's: it may have said already that all is well. */
  #fail(reason: string): void {
    if (!this.#halted) count(this.#context.counters, 'load', reason);
    this.#close('', true);
  }

  #end(): void {
    this.#ended = true;
    const gap = this.#verified.indexOf(0);
    const loaded = gap < 0 ? this.#verified.length : gap;
    this.#release();
    this.#onEnd({ loaded, tiers: this.#tiers.slice(0, loaded) });
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
