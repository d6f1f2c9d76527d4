/**
 * The tokenizer or the chat template is replaced while workers and API servers come and go. Ids of one tokenizer are other words to weights of
 * another: what a worker did not load beside its weights is never used for it.
 */
import { copyFileSync, existsSync, mkdirSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { textDigestOf, textFiles, tokenFiles } from '@kvtier/identity';
import { event, fail, say } from '@kvtier/registry/testing';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { caught, Harness, ids, modelDir } from './testing/harness.ts';
import { TextPool } from './text-pool.ts';
import { loadTokenizer } from './tokenizer.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

const at = new Harness();
let folder: string;
let pool: TextPool;

const digestOf = (dir: string, files = textFiles as Parameters<typeof textDigestOf>[1]): string =>
  textDigestOf((name) => (existsSync(join(dir, name)) ? readFileSync(join(dir, name)) : undefined), files);

/** As downloads and rollouts do: a new file under the old name. */
function replace(name: string, content: string): void {
  writeFileSync(join(folder, 'new'), content);
  renameSync(join(folder, 'new'), join(folder, name));
}

/** As a worker that loads the folder now. */
const describeNow = (): void => {
  at.engine.description = { ...at.engine.description, modelDir: folder, textDigest: digestOf(folder) };
};

/** The prompt that the worker was sent. */
async function promptOfChat(): Promise<readonly number[]> {
  const messages = [{ role: 'user' as const, content: 'a' }];
  await at.client.chat.completions.create({ model: 'demo', messages });
  return at.engine.seen.at(-1)!.request.promptTokenIds;
}

const open = () => at.open({ text: pool });

beforeEach(() => {
  folder = join(at.dir, 'model');
  mkdirSync(folder);
  for (const name of textFiles)
    if (existsSync(join(modelDir, name))) copyFileSync(join(modelDir, name), join(folder, name));
  pool = new TextPool({ threads: 1 });
  at.engine.script = say(ids(' 34'), 'length');
  describeNow();
});
afterEach(() => pool.close());

it.each(textFiles)(
  '%s, after the worker has read it and before the API server does: refused with one line',
  async (name) => {
    const mine = digestOf(folder);
    const path = join(folder, name);
    const before = existsSync(path) ? readFileSync(path, 'utf8') : undefined;
    replace(name, `${before ?? '{{ messages }}'}\n`);
    await expect(open()).rejects.toMatchObject({
      code: 'MODEL',
      message:
        `${folder}: tokenizer and chat template have digest ${digestOf(folder).slice(0, 16)}, the model's workers loaded ` +
        `beside ${mine.slice(0, 16)}; put those files back, or restart the workers`,
    });
    if (before === undefined) rmSync(path);
    else replace(name, before);
    await open();
    expect((await at.client.completions.create({ model: 'demo', prompt: 'a' })).choices[0]!.text).toBe(' 34');
  },
);

it('after the API server has read it: what was read serves on, and who reads it later refuses it', async () => {
  await open();
  const before = await promptOfChat();
  replace('chat_template.jinja', 'another: {{ messages[0].content }}');
  expect(await promptOfChat()).toEqual(before);
  await pool.close();
  pool = new TextPool({ threads: 1 });
  await expect(open()).rejects.toMatchObject({ code: 'MODEL' });
});

it('and the worker is started anew: it is served with what it read, and until that is read, not at all', async () => {
  await open();
  const before = await promptOfChat();
  await at.engine.stop();
  replace('chat_template.jinja', 'another: {{ messages[0].content }}');
  const ofWorker = digestOf(folder);
  // Replaced once more before the API server looks.
  replace('chat_template.jinja', 'a third one: {{ messages[0].content }}');
  const { description } = at.engine;
  at.engine = await at.start('a');
  at.engine.script = say(ids(' 34'), 'length');
  at.engine.description = { ...description, textDigest: ofWorker, bootEpoch: 'another life' };
  // Its files are what is wrong, not its absence.
  await vi.waitUntil(async () => (await caught(promptOfChat())).status === 500, patience);
  expect(at.engine.seen).toEqual([]);
  replace('chat_template.jinja', 'another: {{ messages[0].content }}');
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
  const now = await promptOfChat();
  expect(now).not.toEqual(before);
  expect(now).toEqual(loadTokenizer(folder).encode('another: a', { addSpecialTokens: false }));
});

it('while requests wait for it: they are read again, by what it has read', async () => {
  await open();
  const before = await promptOfChat();
  await at.open({ text: pool, limits: { absentMs: 60_000 } });
  await at.engine.stop();
  await vi.waitUntil(() => at.fleet.workers()[0]?.state === 'silent', patience);
  const waiting = [promptOfChat(), promptOfChat()];
  const expecting = async () => /^kvtier_requests_expecting 2$/m.test(await at.metricsText());
  await vi.waitUntil(expecting, patience);
  replace('chat_template.jinja', 'another: {{ messages[0].content }}');
  const { description } = at.engine;
  at.engine = await at.start('a');
  at.engine.script = say(ids(' 34'), 'length');
  at.engine.description = { ...description, textDigest: digestOf(folder), bootEpoch: 'another life' };
  const now = loadTokenizer(folder).encode('another: a', { addSpecialTokens: false });
  expect(now).not.toEqual(before);
  expect(await Promise.all(waiting)).toEqual([now, now]);
});

it('after a request was read, and before it was sent: it is told to come again, and its tokens go nowhere', async () => {
  await at.open({ text: pool, limits: { absentMs: 60_000, retryMs: 60_000 } });
  // Its body is not kept: somebody was ready when it was read.
  at.engine.script = (call) => void at.engine.stop().then(() => call.end());
  const asked = caught(promptOfChat());
  await vi.waitUntil(() => at.fleet.workers()[0]?.state === 'silent', patience);
  replace('chat_template.jinja', 'another: {{ messages[0].content }}');
  const { description } = at.engine;
  at.engine = await at.start('a');
  at.engine.script = say(ids(' 34'), 'length');
  at.engine.description = { ...description, textDigest: digestOf(folder), bootEpoch: 'another life' };
  expect(await asked).toMatchObject({
    status: 503,
    message: expect.stringContaining('its tokenizer or chat template was replaced after the request was read'),
  });
  expect(at.engine.seen).toEqual([]);
});

it.each([
  { name: 'chat_template.jinja', goesOn: true },
  { name: 'tokenizer.json', goesOn: false },
])('after an answer has begun, $name: it goes on where its tokens are the same words: $goesOn', async (replaced) => {
  const digests = () => ({ textDigest: digestOf(folder), tokenDigest: digestOf(folder, tokenFiles) });
  at.engine.description = { ...at.engine.description, ...digests() };
  await at.open({ text: pool, limits: { absentMs: 60_000, retryMs: 60_000 } });
  const answer = ids(' 34\nQuestion: What');
  at.engine.script = (call) => {
    for (const id of answer.slice(0, 2)) call.write(event({ tokenIds: [id] }));
    void at.engine.stop().then(() => fail(new KvError('DISCONNECTED', 'killed'))(call));
  };
  const messages = [{ role: 'user' as const, content: 'a' }];
  const asked = at.client.chat.completions.create({ model: 'demo', messages, max_tokens: answer.length });
  const outcome = asked.then(
    ({ choices }) => choices[0]!.message.content,
    (error: unknown) => error,
  );
  await vi.waitUntil(() => at.fleet.workers()[0]?.state === 'silent', patience);
  const before = existsSync(join(folder, replaced.name))
    ? readFileSync(join(folder, replaced.name), 'utf8')
    : '{{ messages }}';
  replace(replaced.name, `${before} `);
  const { description } = at.engine;
  const [prompt] = at.engine.seen.map(({ request }) => request.promptTokenIds);
  at.engine = await at.start('a');
  at.engine.script = say(answer.slice(2), 'length');
  at.engine.description = { ...description, ...digests(), bootEpoch: 'another life' };
  if (replaced.goesOn) {
    expect(await outcome).toBe(' 34\nQuestion: What');
    expect(at.engine.seen[0]!.request.promptTokenIds).toEqual([...prompt!, ...answer.slice(0, 2)]);
    return;
  }
  expect(await outcome).toMatchObject({
    status: 503,
    message: expect.stringContaining('its tokenizer or chat template was replaced after the request was read'),
  });
  expect(at.engine.seen).toEqual([]);
});
