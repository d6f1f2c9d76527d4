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

export function createAdmission(name: AdmissionName): AdmissionPolicy {
  return name === 'always' ? new Always() : new SecondTouch();
}

class Always implements AdmissionPolicy {
  readonly name = 'always';

  admit(): boolean {
    return true;
  }
}

/** Names remembered: 4 bytes each. */
const ghostSlots = 1 << 18;
const ways = 4;

/**
 * Admits what is used a second time while it is remembered: fingerprints of what was seen once, in sets of four slots, the
 * oldest of a set goes. (Admitting at the second touch keeps out what is never used again, and costs what is reused exactly
 * once: docs/lessons.md.)
 */
export class SecondTouch implements AdmissionPolicy {
  readonly name = 'second-touch';
  readonly #seen = new Uint32Array(ghostSlots);

  admit(space: string, hash: HashKey): boolean {
    const print = fingerprint(space, hash);
    const set = (print % (ghostSlots / ways)) * ways;
    const seen = this.#seen;
    const at = seen.subarray(set, set + ways).indexOf(print);
    if (at !== -1) {
      seen.copyWithin(set + at, set + at + 1, set + ways);
      seen[set + ways - 1] = 0;
      return true;
    }
    seen.copyWithin(set + 1, set, set + ways - 1); // the newest is first
    seen[set] = print;
    return false;
  }
}

/** FNV-1a with a final mix; never 0. */
function fingerprint(space: string, hash: HashKey): number {
  let h = 0x811c9dc5;
  for (const text of [hash, space]) {
    for (let at = 0; at < text.length; at++) h = Math.imul(h ^ text.charCodeAt(at), 0x01000193);
  }
  h = Math.imul(h ^ (h >>> 16), 0x85ebca6b);
  return (h ^ (h >>> 13)) >>> 0 || 1;
}
