/**
 * Calls to the file system of one device: one at a time, on a native thread of its own, each with a time limit.
 *
 *     run ──▶ queue ──▶ the one call in flight ──ends──▶ promise
 *                            └──late──▶ its promise and those behind it reject; the call itself stays until it ends
 *
 * Invariants: never more than one call, and one open file, in flight; a promise ends within its limit of the moment at which its
 * call began; while a call hangs, nothing new begins.
 */

import { type FilesHandle, native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';

interface Call {
  readonly limitMs: number;
  readonly begin: () => Promise<void>;
  readonly refuse: (error: KvError) => void;
}

export class DeviceFiles {
  readonly #handle: FilesHandle;
  readonly #nowMs: () => number;
  readonly #limitMs: number;
  readonly #dir: string;
  readonly #queue: Call[] = [];
  #current: { readonly call: Call; readonly startMs: number; isLate: boolean } | undefined;
  #closed = false;

  /** `nowMs`: a clock that stands still with the process. `limitMs`: of a call that says no other. */
  constructor(dir: string, limitMs: number, nowMs: () => number) {
    this.#dir = dir;
    this.#limitMs = limitMs;
    this.#nowMs = nowMs;
    this.#handle = native.filesOpen();
  }

  /** Calls that wait or have not ended. */
  get openCount(): number {
    return this.#queue.length + (this.#current === undefined ? 0 : 1);
  }

  /** The call in flight did not end in time. */
  get hangs(): boolean {
    return this.#current?.isLate === true;
  }

  /** Resolves or rejects as `call` does; KvError IO when it did not end in time, or one before it did not. */
  run<T>(call: (files: FilesHandle) => Promise<T>, limitMs = this.#limitMs): Promise<T> {
    return new Promise<T>((resolve, reject) => {
      if (this.#closed || this.#current?.isLate === true) {
        reject(this.#noAnswer());
        return;
      }
      const begin = async (): Promise<void> => {
        try {
          resolve(await call(this.#handle));
        } catch (error) {
          reject(error);
        }
      };
      this.#queue.push({ limitMs, begin, refuse: reject });
      this.#next();
    });
  }

  /** Give up what has taken too long, with all that waits for it. */
  giveUp(): void {
    const current = this.#current;
    if (current === undefined || current.isLate || this.#nowMs() - current.startMs <= current.call.limitMs) return;
    current.isLate = true;
    for (const call of [current.call, ...this.#queue.splice(0)]) call.refuse(this.#noAnswer());
  }

  /** What waits is refused; a call that hangs is left behind with its thread. */
  close(): void {
    this.#closed = true;
    for (const call of this.#queue.splice(0)) call.refuse(this.#noAnswer());
    native.filesClose(this.#handle);
  }

  /** The thread, for what needs no answer; undefined once it is closed. */
  get handle(): FilesHandle | undefined {
    return this.#closed ? undefined : this.#handle;
  }

  #noAnswer(): KvError {
    return new KvError('IO', `${this.#dir}: the device did not answer for ${this.#limitMs} ms`);
  }

  #next(): void {
    if (this.#current !== undefined) return;
    const call = this.#queue.shift();
    if (call === undefined) return;
    this.#current = { call, startMs: this.#nowMs(), isLate: false };
    void call.begin().finally(() => {
      this.#current = undefined;
      this.#next();
    });
  }
}
