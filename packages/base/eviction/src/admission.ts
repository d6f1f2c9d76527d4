/**
 * Admission: what may enter a tier that is written selectively. Pure: no I/O, time is an argument, replayable on traces.
 * Apart from eviction: one chooses what comes, the other what goes (after CacheLib's navy AdmissionPolicy).
 */
import type { HashKey } from '@kvtier/identity';

export interface AdmissionPolicy {
  readonly name: AdmissionName;
  /**
   * The block was made or used, and the tier does not hold it. True: write it now. Asked at most once per use.
   * @param space the namespace's key
   */
  admit(space: string, hash: HashKey, bytes: number, nowUs: number): boolean;
}

export const admissionNames = ['always', 'second-touch'] as const;
export type AdmissionName = (typeof admissionNames)[number];

/** `arenaBytes`: of the arena above the tier. */
export function createAdmission(name: AdmissionName, arenaBytes: number): AdmissionPolicy {
  return name === 'always' ? new Always() : new SecondTouch(arenaBytes);
}

class Always implements AdmissionPolicy {
  readonly name = 'always';

  admit(): boolean {
    return true;
  }
}

/** Names remembered, 4 bytes each: at least so many, */
const leastNames = 1 << 18;
/** and one for so much of the arena, whose blocks are several times as large, mostly. */
const arenaBytesPerName = 1 << 15;
const ways = 8;

/**
 * Admits what is used a second time while it is remembered: fingerprints of what was seen once, in sets of eight slots, the
 * oldest of a set goes. (Admitting at the second touch keeps out what is never used again, and costs what is reused exactly
 * once: docs/lessons.md.)
 *
 * What comes again after the arena has lost it is to be recognised, too: the memory is that of several times what the arena holds.
 */
export class SecondTouch implements AdmissionPolicy {
  readonly name = 'second-touch';
  readonly #seen: Uint32Array;
  readonly #sets: number;

  constructor(arenaBytes: number) {
    this.#sets = Math.floor(Math.max(leastNames, arenaBytes / arenaBytesPerName) / ways);
    this.#seen = new Uint32Array(this.#sets * ways);
  }

  /** The most that it remembers. */
  get names(): number {
    return this.#seen.length;
  }

  admit(space: string, hash: HashKey): boolean {
    // Of two halves that have nothing to do with each other: names of one set are told apart by all 32 bits.
    const [print, place] = fingerprint(space, hash);
    const seen = this.#seen;
    const first = (place % this.#sets) * ways;
    const last = first + ways - 1;
    let at = first;
    while (at <= last && seen[at] !== print) at++;
    const isKnown = at <= last;
    if (isKnown) {
      for (; at < last; at++) seen[at] = seen[at + 1]!;
      seen[last] = 0;
    } else {
      for (at = last; at > first; at--) seen[at] = seen[at - 1]!; // the newest is first
      seen[first] = print;
    }
    return isKnown;
  }
}

/** FNV-1a with two primes, each with a final mix; the first is never 0. */
function fingerprint(space: string, hash: HashKey): [number, number] {
  let a = 0x811c9dc5;
  let b = 0x2f0b4c47;
  for (const text of [hash, space]) {
    for (let at = 0; at < text.length; at++) {
      const code = text.charCodeAt(at);
      a = Math.imul(a ^ code, 0x01000193);
      b = Math.imul(b ^ code, 0x9e3779b1);
    }
  }
  return [mixed(a) || 1, mixed(b)];
}

function mixed(hash: number): number {
  const h = Math.imul(hash ^ (hash >>> 16), 0x85ebca6b);
  return (h ^ (h >>> 13)) >>> 0;
}
