/**
 * What publishers say that cannot be, or that we cannot use: counted by kind, ignored, and told in one line each, at most once a minute for
 * each publisher and kind, however often it is said.
 */

export const lieKinds = [
  'block_size',
  'medium',
  'group',
  'rank',
  'parent',
  'tokens',
  'too_many_blocks',
  'too_many_parts',
  'unreadable',
  'unreadable_batch',
  'no_room',
] as const;
export type LieKind = (typeof lieKinds)[number];

export interface FeedLog {
  info(details: object, message: string): void;
  warn(details: object, message: string): void;
}

const lineMs = 60_000;

/** All of one feed. */
export class LieCounts {
  readonly byKind: Record<LieKind, number> = Object.fromEntries(lieKinds.map((kind) => [kind, 0])) as Record<
    LieKind,
    number
  >;
}

export class Lies {
  readonly #publisher: string;
  readonly #counts: LieCounts;
  readonly #log: FeedLog;
  readonly #nowMs: () => number;
  readonly #told = new Map<LieKind, { atMs: number; since: number }>();

  constructor(publisher: string, counts: LieCounts, log: FeedLog, nowMs: () => number) {
    this.#publisher = publisher;
    this.#counts = counts;
    this.#log = log;
    this.#nowMs = nowMs;
  }

  /** `what`: "blocks of 32 tokens, the index has blocks of 16". */
  tell(kind: LieKind, what: () => string, events = 1): void {
    this.#counts.byKind[kind] += events;
    const now = this.#nowMs();
    const told = this.#told.get(kind) ?? { atMs: Number.NEGATIVE_INFINITY, since: 0 };
    this.#told.set(kind, told);
    told.since += events;
    if (now - told.atMs < lineMs) return;
    this.#log.warn(
      { publisher: this.#publisher, kind, events: told.since },
      `KV events of ${this.#publisher}: ${what()}; ignored`,
    );
    told.atMs = now;
    told.since = 0;
  }
}
