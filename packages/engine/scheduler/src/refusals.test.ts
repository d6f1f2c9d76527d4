/** What an engine does not take, and says so before anything of it is anywhere. */
import { describe, expect, it } from 'vitest';
import { vocabSize } from './testing/content-executor.ts';
import { patience } from './testing/pair.ts';
import { prompt, SchedulerRig } from './testing/rig.ts';

describe('what cannot be served is refused at once', () => {
  const rig = new SchedulerRig({ blockCount: 6, maxModelTokens: 100 });
  it.each([
    ['TOO_LONG', 'at most 19', prompt(1, 20), {}],
    ['REQUEST', 'empty', [], {}],
    ['REQUEST', 'maxTokens', [1], { maxTokens: 0 }],
    ['REQUEST', 'vocabulary', [vocabSize], {}],
    ['REQUEST', 'vocabulary', [-1], {}],
    ['REQUEST', 'temperature', [1], { temperature: Number.NaN }],
    ['REQUEST', 'temperature', [1], { temperature: 1e300 }],
    ['REQUEST', 'topP', [1], { topP: 0 }],
    ['REQUEST', 'topP', [1], { topP: 1e-46 }],
    ['REQUEST', 'topK', [1], { topK: -1 }],
    ['REQUEST', 'stopTokenIds', [1], { stopTokenIds: [999] }],
    ['REQUEST', 'at most 1024', [1], { stopTokenIds: Array<number>(1_025).fill(1) }],
    ['REQUEST', 'adapter', [1], { loraName: 'poet' }],
    ['REQUEST', 'shorten', [1], { cacheSalt: 'x'.repeat(2 ** 21) }],
  ])('%s: %s', (code, words, tokens, params) => {
    const refused = expect.objectContaining({ code, message: expect.stringContaining(words) });
    expect(() => rig.submit('r', tokens, params)).toThrow(refused);
  });

  it.each([2 ** 31 - 1, 2 ** 31, 2 ** 32 - 1])('but a topK of %d is one of all tokens', async (topK) => {
    const own = new SchedulerRig();
    await own.generate('a', [1], { topK });
    expect(own.executor.steps[0]!.topK).toEqual(Int32Array.of(2 ** 31 - 1));
  });

  it('REQUEST: an id that is in use', () => {
    rig.submit('twice', [1, 2]);
    expect(() => rig.submit('twice', [1, 2])).toThrow(expect.objectContaining({ code: 'REQUEST' }));
  });
});

it.each([
  [Array<number>(21).fill(1), '21 tokens; at most 16 fit into this engine'],
  [[1, vocabSize], `token ${vocabSize} is not in the vocabulary (0..${vocabSize - 1})`],
  [[-1], `token -1 is not in the vocabulary (0..${vocabSize - 1})`],
])('a prefix that no prompt can have is not pinned (%#)', (tokens, problem) => {
  const { engine } = new SchedulerRig({ blockCount: 6, maxModelTokens: 100, maxPinnedBlocks: 1 });
  const refused = expect.objectContaining({ code: 'REQUEST', message: `pinned prefix system: ${problem}` });
  expect(() => engine.pinPrefix('system', Int32Array.from(tokens))).toThrow(refused);
});

it('pins that leave no room are refused by their own name', () => {
  for (const pinned of [99, 100, 1000]) {
    const left = `maxPinnedBlocks ${pinned} leaves no request room in a pool of 100 blocks`;
    const message = `engine: ${left}; lower it or raise kvBytes`;
    const refused = expect.objectContaining({ code: 'CONFIG', message });
    expect(() => new SchedulerRig({ blockCount: 100, maxPinnedBlocks: pinned })).toThrow(refused);
  }
  expect(new SchedulerRig({ blockCount: 100, maxPinnedBlocks: 98 }).engine.maxTotalTokens).toBe(4);
});

it.each([
  [{ prefillOnly: { blocks: 0 } }, 'prefillOnly.blocks is 0; the prompt has 2 whole blocks, ask for 1 to 2'],
  [
    { prefillOnly: { blocks: 1, stepBlocks: -1 } },
    'prefillOnly.stepBlocks is -1; use 0 (as many as fit) or a whole number',
  ],
  [{ prefillOnly: { blocks: 2, draws: true }, maxTokens: 0 }, 'maxTokens is 0; ask for at least one token'],
  [{ prefillOnly: { blocks: 3 } }, 'prefillOnly.blocks is 3; the prompt has 2 whole blocks, ask for 1 to 2'],
  [{ handOff: { blocks: 1.5, ...patience } }, 'handOff.blocks is 1.5; the prompt has 2 whole blocks, ask for 1 to 2'],
  [{ handOff: { blocks: 1, stallMs: 0, deadlineMs: 1 } }, 'handOff.stallMs is 0; use 1 to 600000 ms'],
  [{ handOff: { blocks: 1, stallMs: 1, deadlineMs: 1e9 } }, 'handOff.deadlineMs is 1000000000; use 1 to 600000 ms'],
  [
    { prefillOnly: { blocks: 1 }, handOff: { blocks: 1, ...patience } },
    'prefillOnly and handOff exclude each other; ask for one of them',
  ],
])('%o is refused', (params, problem) => {
  const rig = new SchedulerRig();
  expect(() => rig.submit('a', prompt(1, 11), params)).toThrow(
    expect.objectContaining({ code: 'REQUEST', message: `request a: ${problem}` }),
  );
  expect(rig.engine.requestCount).toBe(0);
});
