/** Which part of a long turn is the product's: read from a CPU profile of V8's (samples of the stack, a few a turn). */

export interface Profile {
  readonly nodes: readonly {
    readonly id: number;
    readonly callFrame: { readonly functionName: string; readonly url: string; readonly lineNumber: number };
    readonly children?: readonly number[];
  }[];
  /** µs on the monotonic clock. */
  readonly startTime: number;
  readonly samples: readonly number[];
  readonly timeDeltas: readonly number[];
}

export interface Turn {
  readonly beganMs: number;
  readonly endedMs: number;
  readonly cpuMs: number;
}

/** A stretch of a turn that product code began and that no test code interrupts. */
export interface ProductRun {
  readonly cpuMs: number;
  /** Where most of it was spent, the product's outermost and innermost frames: "FILE:12 begin > … > file:34 inner 40 ms". */
  readonly where: readonly string[];
}

/** Of a turn of 50 ms there are 25; where a busy machine left fewer than these, they say nothing of where the time was spent. */
const leastSamples = 8;

type Kind = 'product' | 'test' | 'neither';

/** Who calls tests. A test that is compiled together with what it calls may be missing between the two. */
const runner = /\/node_modules\/(vitest|@vitest|fast-check)\//;
/** Who copies the tables of this process's memory: that of all test files before, many times what a service has. */
const forker = 'node:internal/child_process';

/** `root`: the checkout's folder, ending with a slash. */
export function productRuns(profile: Profile, root: string, turn: Turn): ProductRun[] {
  const nodes = new Map(profile.nodes.map((node) => [node.id, node]));
  const parents = new Map(profile.nodes.flatMap((node) => (node.children ?? []).map((child) => [child, node.id])));
  const stories = new Map<number, { kind: Kind; where: string }>();
  const tell = (sample: number): { kind: Kind; where: string } => {
    let story = stories.get(sample);
    if (story === undefined) {
      const frames: { kind: Kind; text: string }[] = [];
      let [called, forks] = [false, false];
      for (let id: number | undefined = sample; id !== undefined; id = parents.get(id)) {
        const { url, functionName, lineNumber } = nodes.get(id)!.callFrame;
        const path = url.replace(/^file:\/\//, '').split('?')[0]!;
        const kind = path.startsWith(root) ? kindOf(path.slice(root.length)) : 'neither';
        if (runner.test(path)) called = true;
        if (path === forker && functionName.endsWith('.spawn')) forks = true;
        if (kind !== 'neither')
          frames.push({ kind, text: `${path.slice(root.length)}:${lineNumber + 1} ${functionName}` });
      }
      const [inner, outer] = [frames[0], frames.at(-1)];
      const began = called ? 'test' : (outer?.kind ?? 'neither');
      const isOthers = began === 'product' && (forks || inner!.kind === 'test');
      const where = inner === outer ? outer?.text : `${outer!.text} > ${inner!.text}`;
      story = { kind: isOthers ? 'neither' : began, where: where ?? '' };
      stories.set(sample, story);
    }
    return story;
  };

  const runs: Map<string, number>[] = [];
  let open: Map<string, number> | undefined;
  let total = 0;
  let atUs = profile.startTime;
  for (const [index, sample] of profile.samples.entries()) {
    atUs += profile.timeDeltas[index]!;
    if (atUs < turn.beganMs * 1000 || atUs > turn.endedMs * 1000) continue;
    total++;
    const { kind, where } = tell(sample);
    if (kind === 'test') open = undefined;
    if (kind !== 'product') continue;
    if (open === undefined) {
      open = new Map();
      runs.push(open);
    }
    open.set(where, (open.get(where) ?? 0) + 1);
  }
  if (total < leastSamples) return [];
  const msOf = (count: number): number => (count / total) * turn.cpuMs;
  return runs.map((run) => {
    const count = [...run.values()].reduce((sum, one) => sum + one, 0);
    const most = [...run].toSorted(([, a], [, b]) => b - a).slice(0, 3);
    return { cpuMs: msOf(count), where: most.map(([where, one]) => `${where} ${msOf(one).toFixed(0)} ms`) };
  });
}

function kindOf(path: string): Kind {
  if (/(^|\/)node_modules\//.test(path)) return 'neither';
  if (/^(packages\/(cli|[^/]+\/[^/]+)|services\/[^/]+)\/src\//.test(path) && !/\.test\.ts$|\/testing\//.test(path))
    return 'product';
  return 'test';
}
