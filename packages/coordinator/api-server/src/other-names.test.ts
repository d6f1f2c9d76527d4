/** Pods that serve a model by several names: aliases and LoRA adapters, each by some of the pods. */
import { Pod } from '@kvtier/registry/testing';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { Harness, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const [one, two] = [new Pod(), new Pod()];
const base = { id: 'pods', object: 'model', root: '/m', parent: null, max_model_len: 8_192 };
const names = (...others: object[]) => JSON.stringify({ data: [base, ...others] });
beforeEach(async () => {
  one.models = () => names({ id: 'alias', root: '/m', parent: null });
  two.models = () => names({ id: 'adapter', root: '/lora', parent: 'pods' });
  for (const pod of [one, two]) {
    pod.seen.length = 0;
    pod.answer = ({ response }) => void response.end('{}');
    await pod.start();
  }
  await at.workers(
    { name: 'one', kind: 'openai', address: one.address },
    { name: 'two', kind: 'openai', address: two.address },
  );
  await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
});
afterEach(async () => {
  for (const pod of [one, two]) await pod.stop();
});
const ask = (model: string, headers: Record<string, string> = {}): Promise<Response> =>
  at.post(
    '/v1/completions',
    { model, prompt: 'a'.repeat(1_000) },
    {
      headers: { 'content-type': 'application/json', ...headers },
    },
  );

it('all names are listed, adapters with the model that they are of', async () => {
  const { data } = (await (await fetch(`${at.server.url}/v1/models`)).json()) as { data: object[] };
  expect(data).toMatchObject([{ id: 'pods' }, { id: 'alias' }, { id: 'adapter', parent: 'pods' }]);
  expect(data.map((card) => 'parent' in card)).toEqual([false, false, true]);
  // As vLLM's own tools read it, which take the first one's for the name of its tokenizer.
  expect(data.map((card) => (card as { root?: unknown }).root)).toEqual(['pods', 'pods', 'pods']);
  expect(await jsonOf(await fetch(`${at.server.url}/v1/models/adapter`))).toMatchObject({ id: 'adapter' });
  expect((await fetch(`${at.server.url}/v1/models/none`)).status).toBe(404);
});

it.each([
  ['alias', one, two],
  ['adapter', two, one],
])('requests for %s go to the pods that know it, as they came', async (name, knows, other) => {
  for (let each = 0; each < 6; each++) expect((await ask(name)).status).toBe(200);
  expect([knows.seen.length, other.seen.length]).toEqual([6, 0]);
  expect(JSON.parse(knows.seen[0]!.body)).toMatchObject({ model: name });
});

it('a name that nobody knows is one', async () => {
  const response = await ask('none');
  expect([response.status, (await jsonOf(response)).error.code]).toEqual([404, 'model_not_found']);
});

describe('for the index', () => {
  it('an alias’s blocks are the model’s, an adapter’s are others', async () => {
    const choose = vi.spyOn(at.dispatcher, 'choose');
    for (const name of ['pods', 'alias', 'adapter']) await ask(name);
    const asked = choose.mock.calls.map(([{ model, tokens, keys }]) => ({ model, tokens, keys: [...keys] }));
    choose.mockRestore();
    const [whole, alias, adapter] = asked;
    expect(whole!.keys.length).toBeGreaterThan(0);
    expect(alias).toEqual(whole);
    expect(adapter).toMatchObject({ model: 'pods', tokens: whole!.tokens });
    expect(adapter!.keys.filter((key) => whole!.keys.includes(key))).toEqual([]);
  });

  it('nobody says that an adapter’s prompt is not held', async () => {
    at.holdings.blocks.length = 0;
    const only = { prefer: 'if-available' };
    expect([(await ask('pods', only)).status, (await ask('adapter', only)).status]).toEqual([412, 200]);
  });
});
