/** Small bodies without a text: read at once, and as a thread reads them. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { idsAtOnce } from './ids-at-once.ts';
import { modelDir } from './testing/harness.ts';
import type { TextModel } from './text-model.ts';
import { loadTokenizer } from './tokenizer.ts';
import { understand } from './understand.ts';

const model: TextModel = {
  name: 'demo',
  modelDir,
  maxModelTokens: 4_096,
  vocabSize: 3_520,
  blocks: { blockTokens: 16, algorithm: 'sha256_cbor', seed: 'vllm-none-hash' },
  isPassedOn: false,
};
const bytesOf = (value: unknown): ArrayBuffer =>
  new Uint8Array(new TextEncoder().encode(JSON.stringify(value))).buffer as ArrayBuffer;
const atOnce = (value: unknown, models = [model]) => idsAtOnce('completion', models, bytesOf(value));
const tokenizer = loadTokenizer(modelDir);

it('token ids alone are read at once, and as a thread reads them', () => {
  const prompt = Array.from({ length: 4_000 }, (_, i) => (i * 7) % 3_520);
  const asked = { prompt, max_tokens: 8, temperature: 0, stop: ['"prompt": [1]'], cache_salt: 'mine' };
  const read = atOnce(asked)!;
  expect([...read.prompts[0]!]).toEqual(prompt);
  expect(read).toEqual(understand('completion', new Uint8Array(bytesOf(asked)), [model], () => tokenizer));
});

it('what has a text, is large or is not as it should be is none of these', () => {
  expect(atOnce({ prompt: 'Age: "prompt": [1]' })).toBe(undefined);
  expect(atOnce({ prompt: ['Age:'] })).toBe(undefined);
  expect(atOnce({ prompt: [[5], [6]] })).toBe(undefined);
  expect(atOnce({ prompt: [5, 6], echo: true })).toBe(undefined);
  expect(atOnce({ prompt: [] })).toBe(undefined);
  expect(atOnce({ prompt: [5, 9_999] })).toBe(undefined);
  expect(atOnce({ prompt: [5, 6], temperature: 'hot' })).toBe(undefined);
  expect(atOnce({ prompt: [5, 6], model: 'another' })).toBe(undefined);
  expect(atOnce({ prompt: [5, 6], user: 'x'.repeat(4_096) })).toBe(undefined);
  const spaced = (spaces: number) =>
    new TextEncoder().encode(`{"prompt":[5,${' '.repeat(spaces)}6]}`).buffer as ArrayBuffer;
  expect(idsAtOnce('completion', [model], spaced(60_000))?.prompts).toEqual([Uint32Array.of(5, 6)]);
  expect(idsAtOnce('completion', [model], spaced(70_000))).toBe(undefined);
  expect(atOnce({ prompt: [5, 6] }, [{ ...model, isPassedOn: true }])).toBe(undefined);
  expect(idsAtOnce('chat', [model], bytesOf({ messages: [], prompt: [5] }))).toBe(undefined);
  expect(idsAtOnce('completion', [model], new TextEncoder().encode('{"prompt":[5,6]').buffer as ArrayBuffer)).toBe(
    undefined,
  );
});

it('whatever is read at once a thread reads the same', () => {
  const ids = fc.array(
    fc.oneof({ weight: 20, arbitrary: fc.nat(3_600) }, { weight: 1, arbitrary: fc.constant('Age:') }),
    {
      maxLength: 60,
    },
  );
  const rest = fc.record(
    {
      model: fc.constantFrom('demo', 'other'),
      max_tokens: fc.integer({ min: -1, max: 5_000 }),
      n: fc.integer({ min: 0, max: 5 }),
      echo: fc.boolean(),
      stream: fc.boolean(),
      temperature: fc.double({ min: -0.5, max: 2.5 }),
      seed: fc.integer(),
      stop: fc.oneof(fc.string(), fc.array(fc.string(), { maxLength: 3 })),
      user: fc.string(),
    },
    { requiredKeys: [] },
  );
  fc.assert(
    fc.property(ids, rest, (prompt, others) => {
      const asked = { prompt, ...others };
      const read = atOnce(asked);
      if (read === undefined) return;
      expect(read).toEqual(understand('completion', new Uint8Array(bytesOf(asked)), [model], () => tokenizer));
    }),
  );
});
