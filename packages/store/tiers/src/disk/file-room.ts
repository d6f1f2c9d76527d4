/**
 * What a device knows of the space that its file system has left, for more files or for what is written into those that are
 * there (copy-on-write and thin volumes may refuse that, too): none after a refusal, and again worth a try after a while. Says
 * so once when it ends and once when it is back; where it ends again soon, the waits go on growing.
 */
import { KvError } from '@kvtier/errors';
import type { Log } from '@kvtier/runtime';
import type { RetrySettings } from './options.ts';

/** Whether the file system has space, which may be less than the budget allows. */
export interface Room {
  /** The latest try was refused. */
  readonly isFull: boolean;
  /** May it be tried? */
  readonly isLikely: boolean;
  /** Until then. */
  readonly waitMs: number;
  /** Space was freed: worth a try now. */
  freed(): void;
  /** A try that began at `sinceMs` (of the device's clock) was refused, or not; undefined: now. */
  told(isFull: boolean, sinceMs?: number): void;
}

/** What there is no space for. */
export type RoomFor = 'more files' | 'writes';

const messages = {
  'more files': {
    full: 'a device of the disk tier has no space left for more files: it goes on with those that it has',
    again: 'a device of the disk tier has space for more files again',
  },
  writes: {
    full: 'a device of the disk tier has no space left even for writes into its own files: it goes on reading',
    again: 'a device of the disk tier has space for writes again',
  },
};

export class DeviceRoom implements Room {
  readonly #dir: string;
  readonly #log: Log;
  readonly #retry: RetrySettings;
  readonly #nowMs: () => number;
  readonly #messages: (typeof messages)[RoomFor];
  isFull = false;
  /** The latest wait, and when it ended well. */
  #lastMs = 0;
  #backMs = Number.NEGATIVE_INFINITY;
  #tryAtMs = Number.NEGATIVE_INFINITY;

  constructor(dir: string, log: Log, retry: RetrySettings, nowMs: () => number, what: RoomFor) {
    this.#dir = dir;
    this.#log = log;
    this.#retry = retry;
    this.#nowMs = nowMs;
    this.#messages = messages[what];
  }

  get isLikely(): boolean {
    return this.waitMs <= 0;
  }

  get waitMs(): number {
    return Math.max(0, this.#tryAtMs - this.#nowMs());
  }

  freed(): void {
    this.#tryAtMs = Number.NEGATIVE_INFINITY;
  }

  told(isFull: boolean, sinceMs = this.#nowMs()): void {
    if (!isFull && !this.isFull) return;
    // Begun before the wait: it says nothing new.
    if (this.isFull && sinceMs < this.#tryAtMs) return;
    const { firstMs, longestMs } = this.#retry;
    const fields = { dir: this.#dir };
    const nowMs = this.#nowMs();
    if (isFull) {
      const isAgain = this.isFull || nowMs - this.#backMs <= longestMs;
      if (!this.isFull) this.#log.error(fields, this.#messages.full);
      this.#lastMs = isAgain ? Math.min(longestMs, this.#lastMs * 2 || firstMs) : firstMs;
      this.#tryAtMs = nowMs + this.#lastMs;
    } else {
      this.#log.warn(fields, this.#messages.again);
      this.#backMs = nowMs;
      this.#tryAtMs = Number.NEGATIVE_INFINITY;
    }
    this.isFull = isFull;
  }
}

const enospc = 28;
const edquot = 122;

/** The file system, or the quota of its user, is full. */
export const isNoSpaceErrno = (errno: number | undefined): boolean => errno === enospc || errno === edquot;

/** No file could be made, and there is none to write to. */
export class NoSpaceError extends KvError {
  readonly errno = enospc;

  constructor(dir: string) {
    super('IO', `${dir}: no space left on the device for a single file of the disk tier; free some of it`);
  }
}

export const isNoSpace = (error: unknown): boolean => isNoSpaceErrno((error as { errno?: number }).errno);
