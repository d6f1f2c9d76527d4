/** What an engine does not take, and says so before anything of it is anywhere. */
import { describe, expect, it } from 'vitest';
import { vocabSize } from './testing/content-executor.ts';
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
