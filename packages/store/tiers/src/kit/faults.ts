/** What native code says of an object that it has verified: the `HeaderFault` of packages/base/data-plane/cc/object_header.h. */

/** 'foreign': sound, and of a newer program (`IsForeign` there). */
export type Verdict = 'sound' | 'foreign' | 'wrong';

const none = 0;
const version = 2;
const unknown = 9;

export function verdictOf(fault: number): Verdict {
  if (fault === none) return 'sound';
  return fault === version || fault === unknown ? 'foreign' : 'wrong';
}
