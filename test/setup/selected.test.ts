import { expect, it } from 'vitest';

const scripts = new URL('../../scripts/lib/vitest.mjs', import.meta.url).href;
interface Counts {
  readonly code: number;
  readonly passed: number;
  readonly failed: number;
  readonly skipped: readonly string[];
  readonly flaky: readonly string[];
}
const { within, together } = (await import(scripts)) as {
  within: (folder: string, args: string[]) => string[];
  together: (runs: readonly Counts[]) => Counts;
};

it('names in front of options select files of the folder; without any it is all of it', () => {
  expect(within('test/vllm', [])).toEqual(['test/vllm']);
  expect(within('test/vllm', ['-t', 'gemma3 x1'])).toEqual(['test/vllm', '-t', 'gemma3 x1']);
  expect(within('test/vllm', ['restarts', 'test/vllm/pods.slow.test.ts', '-t', 'llama'])).toEqual([
    'test/vllm/restarts',
    'test/vllm/pods.slow.test.ts',
    '-t',
    'llama',
  ]);
});

it('of runs at the same time all is counted, and what one says of a failure is said', () => {
  const good = { code: 0, passed: 3, failed: 0, skipped: ['a'], flaky: [] };
  const bad = { code: 1, passed: 2, failed: 1, skipped: [], flaky: ['b'] };
  expect(together([good, bad])).toEqual({ code: 1, passed: 5, failed: 1, skipped: ['a'], flaky: ['b'] });
  expect(together([good, good])).toMatchObject({ code: 0, passed: 6, failed: 0 });
});
