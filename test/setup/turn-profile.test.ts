import { describe, expect, it } from 'vitest';
import { type Profile, productRuns } from './turn-profile.ts';

const root = '/checkout/';
const product = 'file:///checkout/packages/store/placement/src/store.ts';
const test = '/checkout/packages/store/placement/src/store.test.ts';
const fake = '/checkout/packages/store/placement/src/testing/bench.ts';
const rooms = ['packages/cli/src/main.ts', 'packages/base/errors/src/index.ts', 'services/cache-node/src/main.ts'];
const vitest = 'file:///checkout/node_modules/@vitest/runner/dist/index.js';

/** Stacks of samples 2 ms apart, outermost frame first (URL, or function and URL), as a profile that begins at 1 s. */
function profileOf(stacks: readonly (readonly string[])[]): Profile {
  const nodes: { id: number; callFrame: Profile['nodes'][number]['callFrame']; children: number[] }[] = [];
  const nodeOf = (url: string): number => {
    const [file, functionName = 'f'] = url.split(' ').toReversed() as [string, string?];
    nodes.push({ id: nodes.length + 1, callFrame: { functionName, url: file, lineNumber: 6 }, children: [] });
    return nodes.length;
  };
  const top = nodeOf('');
  const samples = stacks.map((stack) =>
    stack.reduce((parent, url) => {
      const id = nodeOf(url);
      nodes[parent - 1]!.children.push(id);
      return id;
    }, top),
  );
  return { nodes, startTime: 1_000_000, samples, timeDeltas: samples.map(() => 2_000) };
}
const times = (count: number, ...stack: string[]): string[][] => Array.from({ length: count }, () => stack);
/** What the turn of all samples has of the product, in ms. */
const msOf = (stacks: readonly (readonly string[])[]): number[] =>
  productRuns(profileOf(stacks), root, { beganMs: 1_000, endedMs: 10_000, cpuMs: stacks.length * 2 }).map(
    (run) => run.cpuMs,
  );

describe('whose turn it is', () => {
  it('the product’s when product code began it, also where a fake calls it back', () => {
    expect(msOf(times(40, 'node:internal/timers', product))).toEqual([80]);
    expect(msOf([...times(20, product), ...times(20, product, fake, product)])).toEqual([80]);
    expect(msOf(times(40, product, '/checkout/node_modules/pino/pino.js'))).toEqual([80]);
  });

  it.each(rooms)('the product’s in every room: %s', (file) => {
    expect(msOf(times(40, `file://${root}${file}`))).toEqual([80]);
  });

  it('not the product’s: what a fake computes in its turn, and the fork of a process as large as the test’s', () => {
    expect(
      msOf([...times(20, product), ...times(10, product, fake), ...times(10, product, fake, 'node:buffer')]),
    ).toEqual([40]);
    expect(
      msOf([...times(20, product), ...times(20, product, 'ChildProcess.spawn node:internal/child_process')]),
    ).toEqual([40]);
    expect(msOf(times(40, product, 'node:internal/process'))).toEqual([80]);
  });

  it('the test’s when it called the product, or its runner did and it was compiled away', () => {
    expect(msOf(times(40, test, product))).toEqual([]);
    expect(msOf(times(40, fake, product))).toEqual([]);
    expect(msOf(times(40, vitest, product))).toEqual([]);
  });

  it('nobody’s when there are too few samples of it', () => {
    const turn = { beganMs: 1_000, endedMs: 10_000, cpuMs: 60 };
    const msOfFew = (count: number) =>
      productRuns(profileOf(times(count, product)), root, turn).map(({ cpuMs }) => cpuMs);
    expect([7, 8].map(msOfFew)).toEqual([[], [60]]);
  });

  it('nobody’s when neither is in it', () => {
    expect(msOf(times(40, 'node:fs'))).toEqual([]);
    expect(msOf([...times(20, product), ...times(20)])).toEqual([40]); // the collector of garbage
  });

  it('test code in between begins another stretch', () => {
    expect(msOf([...times(20, product), [test], ...times(30, product)])).toEqual([40, 60]);
  });

  it('samples of other turns do not count, and a thread that did not run was not busy', () => {
    const profile = profileOf(times(100, product));
    const runs = productRuns(profile, root, { beganMs: 1_050, endedMs: 1_100, cpuMs: 30 });
    expect(runs).toEqual([{ cpuMs: 30, where: ['packages/store/placement/src/store.ts:7 f 30 ms'] }]);
  });
});
