import { expect, it } from 'vitest';

const scripts = new URL('../../scripts/lib/vitest.mjs', import.meta.url).href;
const { within } = (await import(scripts)) as { within: (folder: string, args: string[]) => string[] };

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
