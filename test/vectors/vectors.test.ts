/** Recorded runs of vLLM's own manager, replayed op by op. See packages/engine/prefix-cache/vectors/README.md. */
import { readdirSync } from 'node:fs';
import { expect, it } from 'vitest';
import { type Run, readRecorded, replayRuns } from './kv-cache-manager.ts';

const folder = new URL('../../packages/engine/prefix-cache/vectors/', import.meta.url);
const files = readdirSync(folder).filter((name) => name.endsWith('.json.gz'));

it.each(files)('%s', (name) => {
  const { equal, total, first } = replayRuns(readRecorded(new URL(name, folder)) as Run[]);
  expect(first).toBeUndefined();
  expect(equal).toBe(total);
});

/** The same free blocks in the same order, whether the plain queue or the policy of that name keeps them: some of every kind. */
it.each(files.filter((name) => /^(full_bs4|hybrid_three_types|hybrid_partial_full8|hybrid_ret16)/.test(name)))(
  '%s, with LRU as a policy',
  (name) => {
    const runs = readRecorded(new URL(name, folder)) as Run[];
    const { first, equal, total } = replayRuns(runs, { evictionPolicy: 'lru' });
    expect(first).toBeUndefined();
    expect(equal).toBe(total);
  },
);

it('tells where a run differs first', () => {
  const [run] = readRecorded(new URL('swa8.json.gz', folder)) as Run[];
  const index = run!.ops.findIndex(({ op }) => op.name === 'get_computed_blocks');
  const ops = run!.ops.with(index, { ...run!.ops[index]!, res: 'something else' });
  const { equal, total, first } = replayRuns([{ ...run!, ops }]);
  expect([equal, total]).toEqual([index, run!.ops.length]);
  expect(first).toMatchObject({ index, run: 'swa8 seed 0', what: 'result', expected: 'something else' });
});
