/**
 * Whose events can be relied on. A worker whose events cannot is credited with what it was sent; a node whose events cannot, with
 * nothing, and one that was never said to publish any is not looked at. Each change is told in one line, which is a warning unless the publisher has just been seen for the first time.
 */
import type { Keys, KvIndex } from '../kv-index.ts';
import type { Heard } from './engine-streams.ts';
import type { NodeEntry, WorkerEntry } from './followed.ts';
import type { Problem } from './followed-stream.ts';
import { History } from './history.ts';
import type { FeedLog } from './lies.ts';
import type { SharedBlocks, Teller } from './shared-blocks.ts';

export interface RelianceOptions {
  readonly index: KvIndex;
  readonly shared: SharedBlocks;
  readonly logger: FeedLog;
  /** How long what was sent stands for what is held, where nothing tells. */
  readonly guessMs: number | undefined;
  /** Seconds, of a clock that is never set. */
  readonly nowS: () => number;
  /** Another publisher can be relied on, or no longer. */
  readonly onChange: () => void;
}

const defaultGuessMs = 600_000;
/** Blocks of a worker that does not say how many it has. */
const unknownBlocks = 65_536;
/** Events may be late by so much, and requests without any event so many for so long. */
const maxLagS = 5;
/** Connections to one that has just been seen may take so long. */
const joinS = 5;
const maxOwed = 8;
const maxOwedS = 10;
const unpublished: Problem = {
  what: 'publishes no KV events',
  remedy: 'let it, and say where in its record (`events`)',
};

export class Reliance {
  readonly #options: RelianceOptions;
  /** There is no room to guess what some workers hold, and that was told. */
  #isShort = false;

  constructor(options: RelianceOptions) {
    this.#options = options;
  }

  /** Who can be relied on now. */
  look(nodes: Iterable<NodeEntry>, workers: Iterable<WorkerEntry>): void {
    const { index, shared, guessMs = defaultGuessMs, nowS, onChange } = this.#options;
    let unguessed = 0;
    const trusted: Teller[] = [];
    const doubted: Teller[] = [];
    for (const entry of nodes) {
      if (entry.stream === undefined) continue;
      const why = problemOf(entry.stream) ?? entry.listing?.problem;
      const wasTrusted = entry.why === undefined;
      this.#say(`cache node ${entry.record.name}`, entry, why, 'nothing of it is counted');
      if (wasTrusted !== (why === undefined)) (wasTrusted ? doubted : trusted).push(entry.teller);
    }
    if (trusted.length + doubted.length > 0) shared.judged(trusted, doubted);
    for (const entry of workers) {
      const why = this.#whyGuessed(entry);
      this.#say(`worker ${entry.followed.record.name}`, entry, why, 'what it holds is guessed from what it was sent');
      if (why === undefined) {
        entry.history?.close();
        entry.history = undefined;
      } else if (entry.history === undefined) {
        const options = { maxBlocks: entry.followed.totalBlocks || unknownBlocks, ttlMs: guessMs };
        entry.history = History.begin(index, options, nowS() * 1_000);
        if (entry.history === undefined) unguessed++;
        else onChange();
      }
    }
    this.#sayUnguessed(unguessed);
  }

  /** A request with these blocks went to this worker: its events owe something, unless it holds them all. Of hits nobody tells. */
  sent(entry: WorkerEntry, keys: Keys): void {
    if (entry.listings.some((listing) => listing.holds(keys))) return;
    if (entry.owed++ === 0) entry.owedSinceS = this.#options.nowS();
  }

  #sayUnguessed(workers: number): void {
    if (workers > 0 && !this.#isShort) {
      const room = `${this.#options.index.sourceCount} publishers are told apart, and no more can be`;
      const remedy = 'let more workers publish KV events';
      this.#options.logger.warn({ workers }, `${workers} workers are credited with nothing: ${room}; ${remedy}`);
    }
    this.#isShort = workers > 0;
  }

  #whyGuessed(entry: WorkerEntry): Problem | undefined {
    const { stream, followed } = entry;
    if (followed.unread !== undefined) return followed.unread;
    if (stream === undefined) return unpublished;
    const problem = problemOf(stream);
    if (problem !== undefined) return problem;
    if (stream.heardS >= entry.owedSinceS) entry.owed = 0;
    const isSilent = entry.owed >= maxOwed && this.#options.nowS() - entry.owedSinceS > maxOwedS;
    const what = `no KV event although it was sent ${maxOwed} requests`;
    return isSilent ? { what, remedy: stream.silenceRemedy } : undefined;
  }

  #say(who: string, entry: NodeEntry | WorkerEntry, problem: Problem | undefined, so: string): void {
    const why = problem?.what;
    const isNew = entry.why?.what !== why;
    const joiningS = entry.stream?.joiningS ?? Number.POSITIVE_INFINITY;
    const isWarning = why !== undefined && joiningS >= joinS;
    if (!isNew && (entry.isWarned || !isWarning)) return;
    const { logger } = this.#options;
    if (why === undefined) logger.info({ who }, `${who}: its KV events tell what it holds`);
    else if (!isWarning) logger.info({ who, why }, `${who}: ${why} yet; ${so}`);
    else {
      const remedy = problem?.remedy === undefined ? '' : `; ${problem.remedy}`;
      logger.warn({ who, why }, `${who}: ${why}${isNew ? '' : ` for ${joinS} s`}; ${so}${remedy}`);
    }
    entry.isWarned = isWarning;
    entry.why = problem;
    if (isNew) this.#options.onChange();
  }
}

function problemOf(stream: Heard): Problem | undefined {
  const { problem } = stream;
  if (problem !== undefined) return problem;
  const what = `its KV events are more than ${maxLagS} s late`;
  return stream.lagS > maxLagS ? { what, remedy: 'look whether it, the network or we have too much to do' } : undefined;
}
