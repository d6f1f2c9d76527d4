/**
 * What a device knows of the space that its file system has left for more files: none after a refusal, and again worth a try
 * after a while. Says so once when it ends and once when it is back.
 */
import type { Log } from '@kvtier/runtime';
import type { RetrySettings } from './options.ts';
import type { FileRoom } from './segment-pool.ts';

export class DeviceRoom implements FileRoom {
  readonly #dir: string;
  readonly #log: Log;
  readonly #retry: RetrySettings;
  readonly #nowMs: () => number;
  #waitMs = 0;
  #tryAtMs = 0;

  constructor(dir: string, log: Log, retry: RetrySettings, nowMs: () => number) {
    this.#dir = dir;
    this.#log = log;
    this.#retry = retry;
    this.#nowMs = nowMs;
  }

  /** The last file that was tried did not fit. */
  get isFull(): boolean {
    return this.#waitMs > 0;
  }

  get isLikely(): boolean {
    return this.#nowMs() >= this.#tryAtMs;
  }

  told(isFull: boolean): void {
    const { firstMs, longestMs } = this.#retry;
    const fields = { dir: this.#dir };
    if (isFull && !this.isFull) {
      const message = 'a device of the disk tier has no space left for more files: it goes on with those that it has';
      this.#log.error(fields, message);
    } else if (!isFull && this.isFull) {
      this.#log.warn(fields, 'a device of the disk tier has space for more files again');
    }
    this.#waitMs = isFull ? Math.min(longestMs, this.#waitMs * 2 || firstMs) : 0;
    this.#tryAtMs = isFull ? this.#nowMs() + this.#waitMs : 0;
  }
}
