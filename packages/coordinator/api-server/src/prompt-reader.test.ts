/** What is read of a body for a pod: the prompt as the pod will have it, whatever else the body asks for. */
import { join } from 'node:path';
import { defaultRootSeed } from '@kvtier/identity';
import type { Worker } from '@kvtier/registry';
import { expect, it } from 'vitest';
import { attachmentTokens } from './attachments.ts';
import type { Model } from './models.ts';
import { type PassedOn, passOn } from './pass-on.ts';
import { keysOfPrompt } from './prompt-keys.ts';
import { type PromptFacts, PromptReader } from './prompt-reader.ts';
import type { TextModel } from './text-model.ts';
import type { LoadedText, TextPool } from './text-pool.ts';
import { loadTokenizer } from './tokenizer.ts';
import { type BodyKind, understand } from './understand.ts';

const modelDir = join(import.meta.dirname, '../../../../models/demo/model');
const tokenizer = loadTokenizer(modelDir);
const blocks = { blockTokens: 16, algorithm: 'sha256_cbor', seed: defaultRootSeed };
const demo: TextModel = {
  ...{ name: 'demo', modelDir, maxModelTokens: 8_192, vocabSize: 0, blocks, isPassedOn: true },
};
const signal = new AbortController().signal;
/** Reads in this thread. */
const here = {
  run: async (kind: BodyKind, served: readonly LoadedText[], body: ArrayBuffer) =>
    understand(
      kind,
      new Uint8Array(body),
      served.map(({ model }) => model),
      () => tokenizer,
    ),
} as unknown as TextPool;
const workerOf = (kind: 'openai' | 'kvtier', model: string): Worker =>
  ({ record: { kind }, state: 'ready', facts: { model } }) as Worker;
const readerOf = (models: readonly TextModel[], workers: readonly Worker[]): PromptReader =>
  new PromptReader({
    models: {
      among: (name) => new Set([`knows ${name}`]),
      all: () => models.map((model) => ({ name: model.name, text: { model, generation: 1 } }) as Model),
    },
    engines: { workers: () => workers },
    text: here,
  });
const reader = readerOf([demo], [workerOf('openai', 'demo')]);
const bytesOf = (body: object): ArrayBuffer => new Uint8Array(Buffer.from(JSON.stringify(body))).buffer;
const read = (path: string, body: object, of = reader): Promise<PromptFacts> => of.read(path, bytesOf(body), signal);

const prompt = 'Name: John. Age: 17. '.repeat(20);
const ids = Uint32Array.from(tokenizer.encode(prompt, { addSpecialTokens: true, maxTokens: Number.POSITIVE_INFINITY }));
const messages = [{ role: 'user', content: prompt }];
const chatIds = Uint32Array.from(
  tokenizer.encode(tokenizer.chatPrompt([{ role: 'user', content: prompt }]), {
    addSpecialTokens: false,
    maxTokens: Number.POSITIVE_INFINITY,
  }),
);
/** With what pods take and we do not know. */
const unknown = {
  guided_json: {},
  n: 400,
  temperature: 'hot',
  logprobs: true,
  top_logprobs: 3,
  stop: [1],
  vllm_xargs: 1,
};

it('tokens and hashes are those of the prompt, whatever other parameters say', async () => {
  const completion = await read('/v1/completions', { prompt, max_tokens: 7, user: 'me', ...unknown });
  expect(completion).toEqual({
    ...{ model: 'demo', tokens: ids.length, blockTokens: 16, maxTokens: 7, session: 'me' },
    keys: keysOfPrompt(ids, blocks),
    unsplit: 'n wants several answers, and what prefill lends is read once',
  });
  expect(completion.keys.length).toBe(2 * Math.floor(ids.length / 16));
  expect((await read('/v1/completions', { prompt: [...ids], ...unknown })).keys).toEqual(completion.keys);
  const chat = await read('/any/prefix/v1/chat/completions', { messages, ...unknown, tools: [], documents: null });
  expect(chat).toMatchObject({ tokens: chatIds.length, maxTokens: 1_024, keys: keysOfPrompt(chatIds, blocks) });
  const lent = { do_remote_prefill: true, remote_engine_id: 'p', remote_block_ids: [[1]] };
  expect(await read('/v1/completions', { prompt, kv_transfer_params: lent })).toMatchObject({
    isLoan: true,
    whyNoTransfer:
      'kv_transfer_params: tells pods where blocks of a prompt come from, go to or stay, which clients may not. Leave it out',
  });
  const salted = await read('/v1/completions', { prompt, cache_salt: 'mine' });
  expect(salted.keys).toEqual(keysOfPrompt(ids, blocks, 'mine'));
});

it.each<[string, object]>([
  ['tools', { tools: [{ type: 'function' }] }],
  ['a template of the client', { chat_template: 'x' }],
  ['a template’s own parameters', { chat_template_kwargs: { enable_thinking: false } }],
  ['no prompt for the answer', { add_generation_prompt: false }],
  ['images', { messages: [{ role: 'user', content: [{ type: 'image_url', image_url: { url: 'x' } }] }] }],
  ['a tool’s answer', { messages: [...messages, { role: 'tool', content: 'a', tool_call_id: 'b' }] }],
])('a chat that the pod renders in another way is taken as text: %s', async (what, part) => {
  const body = { messages, ...part };
  const facts = await read('/v1/chat/completions', body);
  expect(facts.blockTokens).toBe(64);
  expect(facts.tokens).toBeLessThan(JSON.stringify(body).length / 4 + (what === 'images' ? attachmentTokens : 0));
  expect((await read('/v1/chat/completions', { ...body, seed: 1 })).keys).toEqual(facts.keys);
});

it('several texts of one message are one of several lines', async () => {
  const texts = ['# Employees', prompt, 'What is the age of John?'];
  const keysOf = async (content: unknown) =>
    (await read('/v1/chat/completions', { messages: [{ role: 'user', content }] })).keys;
  const inParts = await keysOf(texts.map((text) => ({ type: 'text', text })));
  expect(inParts.length).toBeGreaterThan(0);
  expect(inParts).toEqual(await keysOf(texts.join('\n')));
});

it('but where the template looks at them one by one: these are taken as text', async () => {
  expect(tokenizer.readsParts).toBe(false);
  const content = [prompt, 'Question: how old?'].map((text) => ({ type: 'text', text }));
  const ofParts = loadTokenizer(modelDir);
  Object.defineProperty(ofParts, 'readsParts', { value: true });
  const facts = (content: unknown): PassedOn =>
    passOn('chat', { messages: [{ role: 'user', content }] }, demo, () => ofParts);
  expect([facts(content).blockTokens, facts(content.slice(0, 1)).blockTokens]).toEqual([64, 16]);
});

it('chats with other tools begin otherwise', async () => {
  const keysOf = async (name: string) =>
    (await read('/v1/chat/completions', { messages, tools: [{ type: 'function', function: { name } }] })).keys;
  const [one, two] = [await keysOf('one'), await keysOf('two')];
  expect(one.length).toBeGreaterThan(0);
  expect(one.slice(0, 2)).not.toEqual(two.slice(0, 2));
});

it.each([
  [1e308, 8_192],
  [2.5, 3],
  [-1, 16],
  ['many', 16],
  [null, 16],
])('max_tokens %j weighs %d', async (max_tokens, weight) => {
  expect((await read('/v1/completions', { prompt, max_tokens })).maxTokens).toBe(weight);
});

it('reads for models of pods, also those that our own workers serve, too, and for no others', async () => {
  const own = { ...demo, isPassedOn: false };
  const other = { ...own, name: 'other' };
  const mixed = readerOf(
    [own, other],
    [workerOf('kvtier', 'demo'), workerOf('openai', 'demo'), workerOf('kvtier', 'other')],
  );
  // Our own workers would refuse these parameters, and with two models the name would have to be given.
  expect(await read('/v1/completions', { prompt, ...unknown }, mixed)).toMatchObject({
    model: 'demo',
    tokens: ids.length,
  });
  await expect(read('/v1/completions', { model: 'other', prompt }, mixed)).rejects.toMatchObject({ status: 404 });
  await expect(
    read('/v1/completions', { prompt }, readerOf([own], [workerOf('kvtier', 'demo')])),
  ).rejects.toMatchObject({
    code: 'DISCONNECTED',
  });
  await expect(read('/v1/embeddings', { input: 'a' })).rejects.toMatchObject({ code: 'REQUEST' });
});
