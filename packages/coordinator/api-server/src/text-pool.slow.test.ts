/** Threads that read texts: what they tell, and that every job ends. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, it } from 'vitest';
import { ids, modelDir } from './testing/harness.ts';
import { smallBodyBytes, TextPool, type TextPoolOptions } from './text-pool.ts';
import type { TextModel } from './understand.ts';

const model: TextModel = { name: 'demo', modelDir, maxModelTokens: 4_096, vocabSize: 3_520 };
const bodyOf = (value: unknown): ArrayBuffer => new TextEncoder().encode(JSON.stringify(value)).buffer as ArrayBuffer;

let pool: TextPool;
afterEach(() => pool.close());
const open = async (options: TextPoolOptions = {}, part: Partial<TextModel> = {}) => {
  pool = new TextPool(options);
  return pool.load({ ...model, ...part });
};
/** Takes a thread seconds: its template is rendered message by message. */
const long = (messages = 200_000): ArrayBuffer =>
  bodyOf({ messages: Array(messages).fill({ role: 'user', content: 'a' }) });

it('gives parameters and token ids, moved and not copied', async () => {
  const loaded = await open();
  const body = bodyOf({ prompt: ['Age:', [5, 6]], n: 2 }); // mixed: refused
  await expect(pool.run('completion', loaded, body)).rejects.toMatchObject({
    status: 400,
    body: { error: { param: 'prompt' } },
  });
  expect(body.byteLength).toBe(0);
  const { prompts, params, echoes } = await pool.run('completion', loaded, bodyOf({ prompt: 'Age:', echo: true }));
  expect([[...prompts[0]!], params.n, echoes]).toEqual([ids('Age:'), 1, ['Age:']]);
  expect(await pool.run('unpin', loaded, bodyOf({ name: 'a' }))).toEqual({ name: 'a' });
});

it('ends a job at its deadline, and the next one has a new thread', async () => {
  const loaded = await open({ threads: 1, jobMs: 3_000 }, { maxModelTokens: 1_000_000 });
  await expect(pool.run('chat', loaded, long())).rejects.toMatchObject({ code: 'DEADLINE' });
  expect((await pool.run('completion', loaded, bodyOf({ prompt: 'Age:' }))).prompts).toHaveLength(1);
});

it('a job that takes too much memory costs itself alone', async () => {
  const loaded = await open({ threads: 1, heapMiB: 64 }, { maxModelTokens: 1_000_000 });
  await expect(pool.run('chat', loaded, long(400_000))).rejects.toMatchObject({
    status: 413,
    body: { error: { code: 'request_too_large' } },
  });
  expect((await pool.run('completion', loaded, bodyOf({ prompt: 'Age:' }))).prompts).toHaveLength(1);
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

it('says what is wrong with a model’s folder', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-text-'));
  await expect(open({}, { modelDir: folder })).rejects.toMatchObject({
    code: 'MODEL',
    message: expect.stringContaining('tokenizer.json: cannot be read'),
  });
  rmSync(folder, { recursive: true });
});
