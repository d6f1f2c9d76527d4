/** Threads that read texts: what they tell, and that every job ends. */
import { mkdtempSync, readdirSync, readFileSync, rmSync } from 'node:fs';
import { getPriority, tmpdir } from 'node:os';
import { join } from 'node:path';
import { ChainHasher, integerForm, SequenceHashes } from '@kvtier/identity';
import { foldsOf } from '@kvtier/kv-index';
import { afterAll, afterEach, expect, it } from 'vitest';
import type { PassedOn } from './pass-on.ts';
import { ids, modelDir } from './testing/harness.ts';
import type { TextModel } from './text-model.ts';
import { type LoadedText, largeBodiesNiceness, TextPool, type TextPoolOptions } from './text-pool.ts';
import { smallBodyBytes } from './text-queue.ts';
import type { UnderstoodPrompts } from './understand.ts';

const model: TextModel = {
  name: 'demo',
  modelDir,
  maxModelTokens: 4_096,
  vocabSize: 3_520,
  blocks: { blockTokens: 16, algorithm: 'sha256_cbor', seed: 'vllm-none-hash' },
  isPassedOn: false,
};
const bodyOf = (value: unknown): ArrayBuffer => new TextEncoder().encode(JSON.stringify(value)).buffer as ArrayBuffer;

/** Of tests that leave their threads as they were: a pool of its own costs each a second or two of a CPU. */
const kept: { pool?: TextPool } = {};
let pool: TextPool;
afterEach(() => (pool === kept.pool ? undefined : pool.close()));
afterAll(() => kept.pool?.close());
const open = async (options: TextPoolOptions = {}, part: Partial<TextModel> = {}) => {
  pool = new TextPool(options);
  return [await pool.load({ ...model, ...part })];
};
const openKept = async () => {
  pool = kept.pool ??= new TextPool({});
  return [await pool.load(model)];
};
const understood = async (loaded: readonly LoadedText[], body: object): Promise<UnderstoodPrompts> =>
  (await pool.run('completion', loaded, bodyOf(body))) as UnderstoodPrompts;
/** Takes a thread seconds: its template is rendered message by message. */
const long = (messages = 200_000): ArrayBuffer =>
  bodyOf({ messages: Array(messages).fill({ role: 'user', content: 'a' }) });

it('gives parameters and token ids, moved and not copied', async () => {
  const loaded = await openKept();
  const body = bodyOf({ prompt: ['Age:', [5, 6]], n: 2 }); // mixed: refused
  await expect(pool.run('completion', loaded, body)).rejects.toMatchObject({
    status: 400,
    body: { error: { param: 'prompt' } },
  });
  expect(body.byteLength).toBe(0);
  const { prompts, params, echoes } = await understood(loaded, { prompt: 'Age:', echo: true });
  expect([[...prompts[0]!], params.n, echoes]).toEqual([ids('Age:'), 1, ['Age:']]);
  expect(await pool.run('unpin', loaded, bodyOf({ name: 'a' }))).toEqual({ model: 'demo', name: 'a' });
});

it('brings the index’s sums along with the names of blocks', async () => {
  const loaded = await openKept();
  const { keys } = await understood(loaded, { prompt: `Age: ${'a b c '.repeat(200)}` });
  const sums = foldsOf(keys[0]!.slice());
  expect(sums.length).toBeGreaterThan(20);
  keys[0]!.reverse(); // made only now, they would be others
  expect(foldsOf(keys[0]!)).toEqual(sums);
});

it('names a prompt’s blocks as an engine does, with its salt', async () => {
  const loaded = await openKept();
  const prompt = Array.from({ length: 50 }, (_, i) => i + 3);
  const keysOf = async (part: object) => [...(await understood(loaded, { prompt, ...part })).keys[0]!];
  const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens: 16, rootSeed: 'vllm-none-hash' });
  const named = (cacheSalt: string): number[] => {
    const hashes = new SequenceHashes(hasher, { cacheSalt });
    hashes.append(Uint32Array.from(prompt));
    return [0, 1, 2].flatMap((block) => {
      const name = integerForm(hashes.slice(block, block + 1));
      return [Number(BigInt.asIntN(32, name)), Number(BigInt.asIntN(32, name >> 32n))];
    });
  };
  expect(await keysOf({})).toEqual(named(''));
  expect(await keysOf({ cache_salt: 'mine' })).toEqual(named('mine'));
  expect(named('')).not.toEqual(named('mine'));
});

it('finds the model that a body names, and passes on what is for others', async () => {
  const own = await openKept();
  const pod = await pool.load({ ...model, name: 'pod', modelDir: '', blocks: undefined, isPassedOn: true });
  const both = [...own, pod];
  await expect(pool.run('completion', both, bodyOf({ prompt: 'a' }))).rejects.toMatchObject({ status: 400 });
  await expect(pool.run('completion', both, bodyOf({ model: 'x', prompt: 'a' }))).rejects.toMatchObject({
    status: 404,
  });
  expect(await understood(both, { model: 'demo', prompt: 'Age:' })).toMatchObject({ model: 'demo' });
  const sent = { model: 'pod', messages: [{ role: 'user', content: 'x'.repeat(1_000) }], tools: [1], user: 'me' };
  const passed = (await pool.run('chat', both, bodyOf(sent))) as PassedOn;
  expect(JSON.parse(Buffer.from(passed.passedOn).toString())).toEqual(sent);
  expect(passed).toMatchObject({ model: 'pod', tokens: 259, blockTokens: 64, maxTokens: 1_024, session: 'me' });
  const longer = { ...sent, messages: [...sent.messages, { role: 'assistant', content: 'y'.repeat(1_000) }] };
  const next = (await pool.run('chat', both, bodyOf(longer))) as PassedOn;
  expect([...next.keys.subarray(0, 6)]).toEqual([...passed.keys.subarray(0, 6)]);
  expect(passed.keys).toHaveLength(2 * 4);
});

it('ends a job at its deadline, and the next one has a new thread', async () => {
  const loaded = await open({ threads: 1, jobMs: 3_000 }, { maxModelTokens: 1_000_000 });
  await expect(pool.run('chat', loaded, long())).rejects.toMatchObject({ code: 'DEADLINE' });
  expect((await understood(loaded, { prompt: 'Age:' })).prompts).toHaveLength(1);
});

it('a job that takes too much memory costs itself alone', async () => {
  const loaded = await open({ threads: 1, heapMiB: 64 }, { maxModelTokens: 1_000_000 });
  await expect(pool.run('chat', loaded, long(400_000))).rejects.toMatchObject({
    status: 413,
    body: { error: { code: 'request_too_large' } },
  });
  expect((await understood(loaded, { prompt: 'Age:' })).prompts).toHaveLength(1);
});

it('large bodies keep no small one waiting; who waits too long, or leaves, leaves the queue', async () => {
  const loaded = await open({ waitMs: 500 }, { maxModelTokens: 1_000_000 });
  const abort = new AbortController();
  let ended = false;
  const first = pool.run('chat', loaded, long()).finally(() => (ended = true));
  first.catch(() => {});
  const second = pool.run('chat', loaded, long());
  const third = pool.run('chat', loaded, long(), abort.signal);
  const gone = new Error('left');
  abort.abort(gone);
  await expect(third).rejects.toBe(gone);
  await expect(second).rejects.toMatchObject({ code: 'BUSY' });
  const small = bodyOf({ prompt: 'Age:' });
  expect(small.byteLength).toBeLessThan(smallBodyBytes);
  await pool.run('completion', loaded, small);
  expect(ended).toBe(false);
  await pool.close();
  await expect(first).rejects.toMatchObject({ code: 'DISCONNECTED' });
  await expect(pool.run('completion', loaded, bodyOf({}))).rejects.toMatchObject({ code: 'DISCONNECTED' });
});

it('the thread of large bodies alone stands back in the queue for a CPU', async () => {
  /** Niceness of each thread of this process. */
  const nice = (): number[] =>
    readdirSync('/proc/self/task').map((thread) => {
      const stat = readFileSync(`/proc/self/task/${thread}/stat`, 'latin1');
      return Number(stat.slice(stat.lastIndexOf(')') + 2).split(' ')[16]);
    });
  const own = getPriority();
  const back = (): number => nice().filter((niceness) => niceness === own + largeBodiesNiceness).length;
  const before = back();
  await open();
  expect(back() - before).toBe(1);
  await pool.close();
  await open({ threads: 1 });
  expect(back() - before).toBe(0);
});

it.each<[string, number, string[]]>([
  ['all of them while they fit', 256, []],
  ['as many as fit, and it is told which were read anew', 32, ['m0', 'm1', 'm2', 'm3', 'm0', 'm1', 'm2', 'm3']],
])('a thread keeps the tokenizers of its models: %s', async (_, heapMiB, wanted) => {
  const reread: string[] = [];
  pool = new TextPool({ threads: 1, heapMiB, onReread: (name) => reread.push(name) });
  const loaded: LoadedText[] = [];
  for (const name of ['m0', 'm1', 'm2', 'm3']) loaded.push(await pool.load({ ...model, name }));
  for (let at = 0; at < 8; at++) await understood(loaded, { model: `m${at % 4}`, prompt: 'Age:' });
  expect(reread).toEqual(wanted);
});

it('says what is wrong with a model’s folder', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-text-'));
  await expect(open({}, { modelDir: folder })).rejects.toMatchObject({
    code: 'MODEL',
    message: expect.stringContaining('tokenizer.json: cannot be read'),
  });
  rmSync(folder, { recursive: true });
});
