/** The longest of what a thread did in one go, by its own CPU time: a busy machine makes none longer, and one whose pages are dear neither. */
import { readFileSync } from 'node:fs';
import { native } from '../index.ts';
import { dearPagesMs } from './new-page.ts';

/** No turn may be longer: only of those that are do pages matter. */
const limitMs = 50;

export interface ThreadUse {
  readonly cpuMs: number;
  /** Pages of memory that were new to this thread. */
  readonly pages: number;
}

/** Of the thread that calls, since it began. */
export function threadUse(): ThreadUse {
  const stat = readFileSync('/proc/thread-self/stat', 'latin1');
  const minorFaults = 7; // after the name, which may hold anything: proc_pid_stat(5)
  const pages = Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ', minorFaults + 1)[minorFaults]);
  return { cpuMs: native.threadCpuMs(), pages };
}

export class LongestTurn {
  #shortMs = 0;
  #long: ThreadUse[] = [];
  readonly #dearMs: (pages: number) => number;

  constructor(dearMs = dearPagesMs) {
    this.#dearMs = dearMs;
  }

  /** A turn has ended. */
  add(before: ThreadUse, after: ThreadUse): void {
    const turn = { cpuMs: after.cpuMs - before.cpuMs, pages: after.pages - before.pages };
    if (turn.cpuMs < limitMs) this.#shortMs = Math.max(this.#shortMs, turn.cpuMs);
    else this.#long.push(turn);
  }

  /** CPU time; of one above 50 ms, less what new pages cost on this machine and on no usual one. */
  get ms(): number {
    if (this.#long.length === 0) return this.#shortMs;
    const dearPageMs = this.#dearMs(1);
    return this.#long.reduce((most, { cpuMs, pages }) => Math.max(most, cpuMs - pages * dearPageMs), this.#shortMs);
  }
}
