/** Bodies of every kind: parameters, or a 400 that names the culprit. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { HttpError } from './errors.ts';
import { parseChat, parseCompletion } from './params.ts';

const keys = [
  ...['prompt', 'messages', 'model', 'n', 'stop', 'seed', 'temperature', 'top_p', 'top_k', 'stream', 'stream_options'],
  ...[
    'max_tokens',
    'max_completion_tokens',
    'logprobs',
    'logit_bias',
    'tools',
    'response_format',
    'modalities',
    'echo',
  ],
  ...['__proto__', 'toString', 'role', 'content', 'type', 'text'],
];
const body = fc.oneof(
  fc.jsonValue(),
  fc.dictionary(fc.constantFrom(...keys), fc.jsonValue(), { noNullPrototype: true }),
  fc.record({ messages: fc.array(fc.dictionary(fc.constantFrom('role', 'content'), fc.jsonValue())) }),
  fc.record({ prompt: fc.oneof(fc.string(), fc.array(fc.nat())), stop: fc.jsonValue() }, { requiredKeys: ['prompt'] }),
);

describe('parameters', () => {
  it('whatever the body, the outcome is parameters or a 400 that names the culprit', () => {
    fc.assert(
      fc.property(body, fc.constantFrom(parseCompletion, parseChat), (value, parse) => {
        try {
          const { n, stops, sampling } = parse(value);
          expect(n).toBeGreaterThanOrEqual(1);
          expect(stops.every((stop) => stop.length > 0)).toBe(true);
          expect(sampling.topP).toBeGreaterThan(0);
        } catch (error) {
          expect(error).toBeInstanceOf(HttpError);
          const { status, body } = error as HttpError;
          expect(status).toBe(400);
          expect(body.error.message).toMatch(/^[^\n]+$/);
          if (body.error.code !== 'invalid_json') expect(body.error.param).toMatch(/./);
        }
      }),
      { numRuns: 1_000 },
    );
  });

  it('null is absent; a nucleus of nothing is the most likely token', () => {
    const params = parseCompletion({ prompt: 'a', temperature: null, stop: null, top_p: 0 });
    expect(params).toMatchObject({ stops: [], n: 1, sampling: { temperature: 1, topP: 1, topK: 1 } });
    expect(parseCompletion({ prompt: 'a', top_k: -1 }).sampling.topK).toBe(0);
  });

  it('null is absent in messages, their parts and a stream’s options, too', () => {
    const nulls = { refusal: null, annotations: null, audio: null, function_call: null, tool_calls: null, name: null };
    const params = parseChat({
      messages: [
        { role: 'user', content: [{ type: 'text', text: 'a', cache_control: null }], name: 'Ann' },
        { role: 'assistant', content: 'b', ...nulls },
      ],
      stream: true,
      stream_options: { include_usage: null, include_obfuscation: null },
    });
    expect(params).toMatchObject({ includeUsage: false });
    expect(params.messages).toEqual([
      { role: 'user', content: 'a', name: 'Ann' },
      { role: 'assistant', content: 'b' },
    ]);
    const absent = (messages: object[]) => () => parseChat({ messages });
    expect(absent([{ role: null, content: 'a' }])).toThrow('messages[0].role: Invalid option');
    expect(absent([{ role: 'user', content: null }])).toThrow('messages[0].content: must be a text');
  });

  it('the newer name of a chat’s limit wins', () => {
    const messages = [
      {
        role: 'user',
        content: [
          { type: 'text', text: 'a' },
          { type: 'text', text: 'b' },
        ],
      },
    ];
    const params = parseChat({ messages, max_tokens: 5, max_completion_tokens: 7, stop: 'x' });
    expect(params).toMatchObject({ maxTokens: 7, maxTokensParam: 'max_completion_tokens', stops: ['x'] });
    expect(params.messages).toEqual([{ role: 'user', content: 'a\nb' }]);
  });
});
