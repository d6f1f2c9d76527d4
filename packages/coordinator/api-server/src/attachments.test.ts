/** Images and the like in chats for pods: what they count as, and what becomes of the chats beside them. */
import { Pod } from '@kvtier/registry/testing';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { attachmentTokens, jsonOfMessages } from './attachments.ts';
import { type PassedOn, passOn } from './pass-on.ts';
import { Harness } from './testing/harness.ts';

const model = {
  ...{ name: 'pods', modelDir: '', maxModelTokens: 8_192, vocabSize: 0, blocks: undefined, isPassedOn: true },
};
const noTokenizer = (): never => {
  throw new Error('asked for a tokenizer');
};
const base64Of = (bytes: number, fill: number): string => Buffer.alloc(bytes, fill).toString('base64');
const imageOf = (fill: number, bytes = 975_000) => ({
  type: 'image_url',
  image_url: { url: `data:image/png;base64,${base64Of(bytes, fill)}` },
});
const textOf = (text: string) => ({ type: 'text', text });
const chatOf = (...content: object[]) => [{ role: 'user', content }];
const read = (messages: unknown, of = model): PassedOn => passOn('chat', { messages }, of, noTokenizer);

it.each<[string, object]>([
  ['a picture', imageOf(1)],
  ['one that lies elsewhere', { type: 'image_url', image_url: { url: 'https://example.com/cat.png', detail: 'low' } }],
  ['sound', { type: 'input_audio', input_audio: { data: base64Of(90_000, 1), format: 'wav' } }],
  ['a video', { type: 'video_url', video_url: { url: `data:video/mp4;base64,${base64Of(90_000, 1)}` } }],
  ['data of a kind that is not known', { type: 'x', x: { data: base64Of(90_000, 1) } }],
])('%s counts as one, whatever its bytes', (_, part) => {
  const { tokens } = read(chatOf(textOf('What is this?'), part));
  expect(tokens).toBeGreaterThan(attachmentTokens);
  expect(tokens).toBeLessThan(attachmentTokens + 64);
});

it('what stands before a picture has the names that it had, and other pictures have others', () => {
  const before = textOf('You are given a picture. '.repeat(40));
  const keysOf = (...parts: object[]): number[] => Array.from(read(chatOf(before, ...parts)).keys);
  const [one, other] = [keysOf(imageOf(1)), keysOf(imageOf(2))];
  expect(one).toEqual(keysOf(imageOf(1)));
  const shared = 2 * Math.floor(JSON.stringify(chatOf(before)).length / 4 / 64);
  expect(one.slice(0, shared)).toEqual(keysOf().slice(0, shared));
  expect(one.slice(0, shared)).toEqual(other.slice(0, shared));
  expect(one.slice(shared + 2)).not.toEqual(other.slice(shared + 2));
});

it('text is text, however much it looks like data', () => {
  const content = base64Of(3_000, 1);
  const messages = [{ role: 'user', content }, ...chatOf(textOf(`data:${content}`))];
  expect(jsonOfMessages(messages)).toBe(JSON.stringify(messages));
});

it('and what only begins like a data URL is text, too', () => {
  const described = {
    type: 'function',
    function: { name: 'rows', description: `data: rows, ${'as JSON '.repeat(200)}` },
  };
  const messages = [{ role: 'assistant', content: 'x', reasoning_content: 'data:,short' }];
  expect(jsonOfMessages([[described], messages])).toBe(JSON.stringify([[described], messages]));
});

it('prompts of a batch count all', () => {
  const prompt = Array.from({ length: 200 }, () => 'word '.repeat(1_600));
  const { tokens } = passOn('completion', { prompt }, model, noTokenizer);
  expect(tokens).toBe(Math.ceil(JSON.stringify(prompt).length / 4));
});

describe('at pods', () => {
  const at = new Harness();
  const patience = { timeout: 20_000 };
  const pods = [new Pod(), new Pod()].map((pod) => Object.assign(pod, { model: 'pods' }));
  beforeEach(async () => {
    for (const pod of pods) {
      pod.seen.length = 0;
      await pod.start();
    }
    await at.workers(...pods.map(({ address }, i) => ({ name: `pod-${i}`, kind: 'openai' as const, address })));
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  });
  afterEach(async () => {
    for (const pod of pods) await pod.stop();
  });

  it('one with a picture is in time, and others go on beside its answer', async () => {
    const inTime = { 'content-type': 'application/json', 'x-slo-ttft-ms': '60000' };
    const ask = (messages: unknown): Promise<Response> =>
      at.post('/v1/chat/completions', { model: 'pods', messages }, { headers: inTime });
    // At 2,000 tokens a second its bytes alone would be read for minutes.
    const pictures = [1, 2].map((fill) => ask(chatOf(textOf('What is this?'), imageOf(fill))));
    const early = Promise.race(pictures).then(async (answer) => {
      throw new Error(`a picture is answered before its pod has spoken: ${answer.status} ${await answer.text()}`);
    });
    early.catch(() => {}); // in the end they are answered
    await Promise.race([vi.waitUntil(() => pods.flatMap(({ seen }) => seen).length >= 2, patience), early]);
    const small = ask([{ role: 'user', content: 'hi' }]);
    const smallSeen = () => pods.flatMap(({ seen }) => seen).find(({ body }) => body.length < 1_000);
    await vi.waitUntil(() => smallSeen() !== undefined, patience);
    expect(at.dispatcher.stats().given).toBe(3);
    for (const { seen } of pods) for (const { response } of seen) response.end('{}');
    expect((await Promise.all([...pictures, small])).map(({ status }) => status)).toEqual([200, 200, 200]);
  });
});
