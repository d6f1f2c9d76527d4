/** Workers whose pools hold sequences of several lengths: who gets which prompt, and what clients are told of their model's context. */
import { KvError } from '@kvtier/errors';
import { type Call, event, fail, type ScriptedEngine, say } from '@kvtier/registry/testing';
import { beforeEach, describe, expect, it, vi } from 'vitest';
import { caught, Harness, ids, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const little = 64;
let other: ScriptedEngine;
beforeEach(async () => {
  other = await at.start('b');
});

const prompt = Array.from({ length: 40 }, (_, i) => i + 3);
const long = Array.from({ length: 200 }, (_, i) => i + 300);
type Reply = { choices: { token_ids: number[] }[] };
const ask = (part: object = {}): Promise<Response> =>
  at.post('/v1/completions', { prompt, max_tokens: 8, temperature: 0, ...part });
const told = async (response: Response) => [response.status, (await jsonOf(response)).error.code];
const given = (): number[] => at.engines.map(({ seen }) => seen.length);
const atRest = (): Promise<unknown> => vi.waitUntil(() => at.dispatcher.stats().given === 0, patience);
const context = async (): Promise<unknown> => {
  const { data } = await at.client.models.list();
  return data.map((model) => (model as unknown as { max_model_len: number }).max_model_len);
};

/** Pools of `a` and `b`, in tokens of a sequence; undefined: it does not say. `a` is nearer to every prompt. */
async function become(a: number | undefined, b: number | undefined): Promise<void> {
  for (const [engine, tokens] of [[at.engine, a] as const, [other, b] as const])
    engine.description = { ...engine.description, maxTotalTokens: tokens === undefined ? undefined : BigInt(tokens) };
  await at.open();
  await at.workers(at.named('a'), at.named('b'));
  at.holdings.blocks[0] = 1;
}

/** As a worker answers whose pool is little. */
const small = (call: Call): void => {
  const { length } = call.request.promptTokenIds;
  if (length + 1 > little) fail(new KvError('TOO_LONG', `request: the prompt has ${length} tokens; shorten it`))(call);
  else say(ids(' 34'), 'length')(call);
};

describe('a request', () => {
  it('goes to a worker whose pool holds it, however near another one is', async () => {
    await become(little, 4_096);
    at.engine.script = small;
    other.script = say(ids(' 34'), 'length');
    const statuses = await Promise.all(Array.from({ length: 6 }, async () => (await ask({ prompt: long })).status));
    expect([statuses, given()]).toEqual([Array<number>(6).fill(200), [0, 6]]);
    expect((await ask()).headers.get('x-kvtier-worker')).toBe('a');
    await atRest();
  });

  it('goes to one that holds all of its answer, too, as long as such a one is there', async () => {
    await become(little, 4_096);
    for (const engine of [at.engine, other]) engine.script = say(ids(' 34'), 'length');
    const workerOf = async (part: object) => (await ask(part)).headers.get('x-kvtier-worker');
    expect(await workerOf({ max_tokens: little - prompt.length })).toBe('a');
    expect(await workerOf({ max_tokens: little - prompt.length + 1 })).toBe('b');
    await other.stop();
    await vi.waitUntil(() => at.fleet.workers()[1]!.state === 'silent', patience);
    expect(await workerOf({ max_tokens: little - prompt.length + 1 })).toBe('a');
    await atRest();
  });

  it('that has begun goes on where a pool holds it', async () => {
    await become(little, 4_096);
    const third = await at.start('c');
    third.description = { ...third.description, maxTotalTokens: 4_096n };
    await at.workers(at.named('a'), at.named('b'), at.named('c'));
    at.holdings.blocks.splice(0, 3, 2, 1, 0);
    at.engine.script = small;
    other.script = (call) => {
      call.write(event({ tokenIds: ids(' 34').slice(0, 1) }));
      fail(new KvError('DISCONNECTED', 'killed'))(call);
    };
    third.script = say([200], 'length');
    const response = await ask({ prompt: long, return_token_ids: true });
    const { choices } = (await response.json()) as Reply;
    expect(choices[0]!.token_ids).toEqual([...ids(' 34').slice(0, 1), 200]);
    expect(given()).toEqual([0, 1, 1]);
    await atRest();
  });

  it('that has begun waits for the one that holds it, where that is away', async () => {
    await become(little, 4_096);
    at.engine.script = small;
    let times = 0;
    other.script = (call) => {
      if (times++ > 0) return say([200], 'length')(call);
      call.write(event({ tokenIds: [201] }));
      return fail(new KvError('DISCONNECTED', 'killed'))(call);
    };
    const { choices } = (await (await ask({ prompt: long, return_token_ids: true })).json()) as Reply;
    expect([choices[0]!.token_ids, given()]).toEqual([
      [201, 200],
      [0, 2],
    ]);
    await atRest();
  });

  it('is tried elsewhere where a worker refuses its length that does not say what it holds', async () => {
    await become(undefined, undefined);
    at.engine.script = small;
    other.script = say(ids(' 34'), 'length');
    expect((await ask({ prompt: long })).status).toBe(200);
    expect(given()).toEqual([1, 1]);
    other.script = small;
    expect(await told(await ask({ prompt: long }))).toEqual([400, 'context_length_exceeded']);
    expect(given()).toEqual([2, 2]);
    await atRest();
  });
});

describe('the context that clients are told', () => {
  it('is no more than the largest pool holds, as workers come and go', async () => {
    at.engine.description = { ...at.engine.description, maxTotalTokens: BigInt(little) };
    await at.open();
    other.description = { ...other.description, maxTotalTokens: 128n };
    await at.workers(at.named('a'));
    expect(await context()).toEqual([little]);
    at.engine.script = say(ids(' 34'), 'length');
    expect((await ask({ max_tokens: little - prompt.length })).status).toBe(200);
    const beyond = await caught(at.client.completions.create({ model: 'demo', prompt, max_tokens: 100 }));
    expect([beyond.status, beyond.error]).toMatchObject([
      400,
      { param: 'max_tokens', code: 'context_length_exceeded', message: expect.stringContaining(`is ${little} tokens`) },
    ]);
    expect(await told(await ask({ prompt: long }))).toEqual([400, 'context_length_exceeded']);
    expect(at.engine.seen).toHaveLength(1);

    await at.workers(at.named('a'), at.named('b'));
    expect(await context()).toEqual([128]);
    other.script = say(ids(' 34'), 'length');
    expect((await ask({ max_tokens: 80 })).headers.get('x-kvtier-worker')).toBe('b');

    await at.workers(at.named('a'));
    expect(await context()).toEqual([little]);
  });

  it('is the model’s own where a worker does not say what it holds, or holds more', async () => {
    const { maxModelTokens } = at.engine.description;
    await become(little, undefined);
    expect(await context()).toEqual([maxModelTokens]);
    await become(little, 2 * maxModelTokens);
    expect(await context()).toEqual([maxModelTokens]);
  });

  it('is how long a chat may be that names no end', async () => {
    at.engine.description = { ...at.engine.description, maxTotalTokens: BigInt(little) };
    await at.open();
    at.engine.script = say(ids(' 34'), 'length');
    await at.client.chat.completions.create({ model: 'demo', messages: [{ role: 'user', content: 'a' }] });
    const { promptTokenIds, maxTokens } = at.engine.seen[0]!.request;
    expect(promptTokenIds.length + maxTokens).toBe(little);
  });
});
