/**
 * Whom a match asks about, laid out for it: the sources of all targets in one array. A cluster's targets are objects all over the heap;
 * a decision that finds them in no cache would wait for each.
 */

/** What can serve one request: the sources whose blocks are at hand there (an engine, its cache node, what is shared). */
export interface Target {
  readonly sources: readonly number[];
}

export class Targets {
  readonly count: number;
  /** The sources of target i are those from ends[i - 1] on, before ends[i]. */
  readonly ends: Int32Array;
  readonly sources: Int32Array;

  constructor(targets: readonly Target[]) {
    this.count = targets.length;
    this.ends = new Int32Array(targets.length);
    this.sources = new Int32Array(targets.reduce((sum, { sources }) => sum + sources.length, 0));
    let end = 0;
    for (const [i, { sources }] of targets.entries()) {
      this.sources.set(sources, end);
      end += sources.length;
      this.ends[i] = end;
    }
  }
}
