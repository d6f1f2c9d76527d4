/** What a pod's stream begins with, however its bytes are cut, and for how long it is held. */
import { afterEach, describe, expect, it, vi } from 'vitest';
import { outcomeOf, type Started, StartReader, startOf, type Verdict } from './stream-start.ts';

afterEach(() => void vi.useRealTimers());

const event = (data: object | string): string => `data: ${typeof data === 'string' ? data : JSON.stringify(data)}\n\n`;
const choice = (part: object): object => ({ choices: [{ index: 0, finish_reason: null, ...part }] });
const role = event(choice({ delta: { role: 'assistant', content: '', reasoning_content: null, tool_calls: [] } }));
const token = event(choice({ delta: { content: 'é' } }));
/** Two pieces of an event, of which the first is overwritten once it has been read. */
async function* overwritten(first: Buffer, rest: Buffer): AsyncGenerator<Buffer> {
  yield first;
  first.write('400', first.indexOf('500'));
  yield rest;
}
const readBy = async (reader: StartReader, ...pieces: [Buffer, Buffer]): Promise<Verdict | undefined> => {
  let verdict: Verdict | undefined;
  for await (const piece of overwritten(...pieces)) verdict = reader.push(piece);
  return verdict;
};
/** Which no text can be made of. */
const noWord = { toString: null };
const deep = `{"error":{"type":${'['.repeat(10_000)}${']'.repeat(10_000)}}}`;
const error = (code: unknown, type?: unknown): object => ({ error: { message: 'EngineCore died', type, code } });

async function* piecesOf(pieces: readonly (string | Buffer)[]): AsyncGenerator<Buffer> {
  for (const piece of pieces) yield Buffer.from(piece);
}
const started = (...pieces: (string | Buffer)[]): Promise<Started> => startOf(piecesOf(pieces));
const allOf = async ({ rest }: Started): Promise<string> => {
  const all: Buffer[] = [];
  for await (const piece of rest) all.push(piece);
  return Buffer.concat(all).toString();
};
const failedWith = (json: object, status: number): object => ({ kind: 'failed', status, json: JSON.stringify(json) });
const goesOn = { kind: 'goes on', isRefused: false, finishReason: undefined };
const refused = { ...goesOn, isRefused: true };

it.each<[string, string, object]>([
  ['text', event(choice({ text: 'a' })), goesOn],
  ['a token without text', event(choice({ text: '', token_ids: [7] })), goesOn],
  ['a thought', event(choice({ delta: { role: 'assistant', reasoning: 'a' } })), goesOn],
  ['a call', event(choice({ delta: { tool_calls: [{ index: 0 }] } })), goesOn],
  ['one choice of several', event({ choices: [null, { text: '' }, { text: 'a' }] }), goesOn],
  ['a finish reason', event(choice({ text: '', finish_reason: 'stop' })), { ...goesOn, finishReason: 'stop' }],
  [
    'an abort behind a token',
    event(choice({ text: 'a', finish_reason: 'abort' })),
    { ...goesOn, finishReason: 'abort' },
  ],
  ['an abort', event(choice({ delta: {}, finish_reason: 'abort' })), { kind: 'aborted' }],
  ['its end', event('[DONE]'), goesOn],
  ['nonsense', event('{'), goesOn],
  ['what is no object', event('1'), goesOn],
  ['nothing at all', '', goesOn],
  ['comments and an end', ': a\n\n', goesOn],
  ['no error', event({ error: null, ...choice({ text: 'a' }) }), goesOn],
  ['a refusal', event(error(400)), { ...goesOn, isRefused: true }],
  ['a full queue', event(error(429)), { kind: 'failed', status: 429, json: JSON.stringify(error(429)) }],
  ['a failure', event(error(503)), { kind: 'failed', status: 503, json: JSON.stringify(error(503)) }],
  ['a refusal whose code is a text', event(error('400')), { ...goesOn, isRefused: true }],
  ['a full queue whose code is a text', event(error('429')), failedWith(error('429'), 429)],
  ['a failure whose code is a text', event(error('503')), failedWith(error('503'), 503)],
  ['what OpenAI refuses', event(error('context_length', 'invalid_request_error')), { ...goesOn, isRefused: true }],
  ['what vLLM refuses', event(error(undefined, 'BadRequestError')), { ...goesOn, isRefused: true }],
  ['what SGLang refuses', event(error(null, 'BAD_REQUEST')), { ...goesOn, isRefused: true }],
  [
    'whom OpenAI has no room for',
    event(error(null, 'rate_limit_error')),
    failedWith(error(null, 'rate_limit_error'), 429),
  ],
  ['a failure by type', event(error(null, 'InternalServerError')), failedWith(error(null, 'InternalServerError'), 500)],
  ['a code beside its type', event(error(500, 'BadRequestError')), failedWith(error(500, 'BadRequestError'), 500)],
  ['no status', event(error('4000')), failedWith(error('4000'), 500)],
  ['a type that every object has', event(error(null, 'constructor')), failedWith(error(null, 'constructor'), 500)],
  ['a type and a code that are no words', event(error(noWord, noWord)), failedWith(error(noWord, noWord), 500)],
  ['a type that is deep', `data: ${deep}\n\n`, { kind: 'failed', status: 500, json: deep }],
  [
    'a finish reason that is no word',
    event(choice({ text: '', finish_reason: noWord })),
    { ...goesOn, finishReason: 'none' },
  ],
  ['a failure by name', event(error('dead')), { kind: 'failed', status: 500, json: JSON.stringify(error('dead')) }],
  ['a failure in a word', event({ error: 'dead' }), { kind: 'failed', status: 500, json: '{"error":"dead"}' }],
])('%s', async (_, text, verdict) => {
  for (const before of ['', role, `: ping\n\n\n${role}${event({ choices: [] })}`]) {
    if (text === '' && before !== '') continue;
    const whole = await started(before + text);
    expect([whole.verdict, await allOf(whole)]).toEqual([verdict, before + text]);
    const bytes = Buffer.from(before + text);
    const cut = await started(...Array.from(bytes, (_, at) => bytes.subarray(at, at + 1)));
    expect([cut.verdict, await allOf(cut)]).toEqual([verdict, before + text]);
  }
});

it.each(['\n', '\r\n', '\r'])('lines may end with %j, and data be of several', async (end) => {
  const text = `event: x${end}data: {"error":${end}data:{"code":500}}${end}id: 1${end}${end}`;
  for (const pieces of [[text], [...text]])
    expect((await started(...pieces)).verdict).toEqual({
      kind: 'failed',
      status: 500,
      json: '{"error":\n{"code":500}}',
    });
});

it('what was held comes in one piece, and nothing behind it is waited for', async () => {
  const asked = vi.fn();
  const pieces = async function* () {
    yield Buffer.from(': ping\n\n');
    yield Buffer.from(role + token.slice(0, 20));
    yield Buffer.from(`${token.slice(20)}data: {`);
    asked();
    yield Buffer.from('}\n\n');
  };
  const { rest } = await startOf(pieces());
  const parts = rest[Symbol.asyncIterator]();
  expect(String((await parts.next()).value)).toBe(`: ping\n\n${role}${token}data: {`);
  expect(asked).not.toHaveBeenCalled();
  expect([String((await parts.next()).value), (await parts.next()).done]).toEqual(['}\n\n', true]);
});

it('no more than so many bytes are held', async () => {
  const piece = Buffer.from(`: ${'a'.repeat(64 << 10)}\n`);
  let count = 0;
  const endless = async function* () {
    for (;;) {
      count++;
      yield piece;
    }
  };
  const { verdict, rest } = await startOf(endless());
  expect([verdict, count]).toEqual([goesOn, 4]);
  expect((await rest[Symbol.asyncIterator]().next()).value).toEqual(Buffer.concat(Array(4).fill(piece)));
});

/** A stream of which each piece is said by hand. */
class Spoken {
  #say: ((piece: IteratorResult<Buffer>) => void) | undefined;
  #fail: ((error: Error) => void) | undefined;
  left = false;
  readonly parts: AsyncIterator<Buffer> = {
    next: () =>
      new Promise((resolve, reject) => {
        this.#say = resolve;
        this.#fail = reject;
      }),
    return: async () => {
      this.left = true;
      this.#fail?.(new Error('left'));
      return { done: true, value: undefined };
    },
  };

  async say(text: string): Promise<void> {
    this.#say!({ done: false, value: Buffer.from(text) });
    await vi.advanceTimersByTimeAsync(0);
  }

  async end(): Promise<void> {
    this.#say!({ done: true, value: undefined });
    await vi.advanceTimersByTimeAsync(0);
  }
}

it.each<[string, number, string, number, string]>([
  ['behind a role half a second shows whether its token comes, too', 15_000, role, 15_500, role],
  ['behind a role that comes late, too', 29_900, role, 30_400, role],
  ['behind comments from when it was asked for', 15_000, ': ping\n\n', 30_000, ': ping\n\n: ping\n\n'],
  ['and comments that come late not at all', 60_000, ': ping\n\n', 60_000, ': ping\n\n'],
])('nor for longer than clients may wait: %s', async (_, firstMs, text, heldUntilMs, held) => {
  vi.useFakeTimers();
  const beganMs = performance.now();
  const advanceTo = (ms: number) => vi.advanceTimersByTimeAsync(ms - (performance.now() - beganMs));
  const spoken = new Spoken();
  const settled = vi.fn();
  const begun = startOf(spoken.parts);
  void begun.then(settled);
  await advanceTo(firstMs); // until its first byte it may take as long as any answer
  await spoken.say(text);
  if (held !== text) await advanceTo((firstMs + heldUntilMs) / 2);
  if (held !== text) await spoken.say(text);
  if (heldUntilMs > firstMs) {
    await advanceTo(heldUntilMs - 1);
    expect(settled).not.toHaveBeenCalled();
    await advanceTo(heldUntilMs);
  }
  expect(settled.mock.calls).toMatchObject([[{ verdict: goesOn }]]);
  const parts = (await begun).rest[Symbol.asyncIterator]();
  expect(String((await parts.next()).value)).toBe(held);
  // The piece that was asked for before is the next one.
  const next = parts.next();
  await spoken.say(token);
  expect(String((await next).value)).toBe(token);
});

it('the time counts from when it was asked for', async () => {
  vi.useFakeTimers();
  const sentAtMs = performance.now();
  await vi.advanceTimersByTimeAsync(20_000);
  const spoken = new Spoken();
  const settled = vi.fn();
  void startOf(spoken.parts, { sentAtMs }).then(settled);
  await spoken.say(': ping\n\n');
  await vi.advanceTimersByTimeAsync(9_999);
  expect(settled).not.toHaveBeenCalled();
  await vi.advanceTimersByTimeAsync(1);
  expect(settled).toHaveBeenCalledOnce();
});

describe('an event that has begun when the time is over', () => {
  const failure = event(error(500));
  const [half, rest] = [failure.slice(0, 30), failure.slice(30)];
  /** A stream whose first piece comes so late; then the time goes on so far, another piece comes, and so on. */
  const heldFor = async (firstMs: number, ...steps: readonly (number | string)[]) => {
    vi.useFakeTimers();
    const spoken = new Spoken();
    const settled = vi.fn();
    void startOf(spoken.parts).then(settled);
    await vi.advanceTimersByTimeAsync(firstMs);
    const outcomes: (object | string)[] = [];
    for (const step of steps) {
      if (typeof step === 'string') await spoken.say(step);
      else await vi.advanceTimersByTimeAsync(step);
      outcomes.push(settled.mock.calls[0] === undefined ? 'held' : (settled.mock.calls[0] as [Started])[0].verdict);
    }
    return outcomes;
  };
  const failed = failedWith(error(500), 500);
  it.each<[string, number, (number | string)[], (object | string)[]]>([
    ['is waited for', 60_000, [half, 499, rest], ['held', 'held', failed]],
    ['behind comments, too', 10_000, [': ping\n\n', 19_000, half, 1_499, rest], [...Array(4).fill('held'), failed]],
    ['and behind a role', 0, [role, 499, half, 500, rest], [...Array(4).fill('held'), failed]],
    ['once', 60_000, [half, 499, rest.slice(0, 9), 1], ['held', 'held', 'held', goesOn]],
    ['and none that is a comment', 60_000, [': pi'], [goesOn]],
    [
      'and not again behind a role that it was',
      60_000,
      [role.slice(0, 30), 499, role.slice(30) + half, 499, 1],
      [...Array(4).fill('held'), goesOn],
    ],
  ])('%s', async (_, firstMs, steps, outcomes) => {
    expect(await heldFor(firstMs, ...steps)).toEqual(outcomes);
  });
});

describe('what it says of its pod', () => {
  const wellDone = { failure: undefined };
  const of = async (...pieces: string[]): Promise<readonly (object | undefined)[]> => {
    const told: Verdict[] = [];
    const { rest } = await startOf(piecesOf(pieces), { told: (verdict) => told.push(verdict) });
    expect(told).toHaveLength(1);
    for await (const _ of rest);
    return told.map(outcomeOf);
  };
  it.each<[string, string, object | undefined]>([
    ['a token', token, wellDone],
    ['an end', event('[DONE]'), wellDone],
    ['nothing', '', wellDone],
    ['a failure', event(error(503)), { failure: 'answers 503 in its first event' }],
    ['an abort', event(choice({ finish_reason: 'abort' })), { failure: 'ends with "abort" before its first token' }],
    ['a full queue', event(error(429)), undefined],
    ['a refusal', event(error(400)), undefined],
  ])('%s is told once', async (_, text, outcome) => {
    expect(await of(text)).toEqual([outcome]);
    if (text !== '') expect(await of(': ping\n\n', role + text, event(error(500)))).toEqual([outcome]);
  });

  /** A stream of which comments alone came in time; then this was said, and `end`ed. */
  const behindComments = async (...texts: (string | undefined)[]) => {
    vi.useFakeTimers();
    const spoken = new Spoken();
    const told: Verdict[] = [];
    const begun = startOf(spoken.parts, { told: (verdict) => told.push(verdict) });
    await spoken.say(': ping\n\n');
    await vi.advanceTimersByTimeAsync(30_000);
    const parts = (await begun).rest[Symbol.asyncIterator]();
    await parts.next();
    expect(told).toEqual([]);
    for (const text of texts) {
      const next = parts.next();
      if (text === undefined) await spoken.end();
      else await spoken.say(text);
      expect((await next).value?.toString()).toBe(text);
    }
    return { spoken, parts, outcomes: () => told.map(outcomeOf) };
  };
  it.each<[string, (string | undefined)[], (object | undefined)[]]>([
    ['a token', [': ping\n\n', token.slice(0, 9), token.slice(9), event(error(500)), undefined], [wellDone]],
    ['an error', [role, event(error(500)), token], [{ failure: 'answers 500 in its first event' }]],
    ['a refusal', [event(error(400)), token], [undefined]],
    ['its end', [undefined], [wellDone]],
    ['more comments', [': ping\n\n'], []],
  ])('behind comments alone it is told later: %s', async (_, texts, outcomes) => {
    expect((await behindComments(...texts)).outcomes()).toEqual(outcomes);
  });

  it('and one that is left then says nothing', async () => {
    const { spoken, parts, outcomes } = await behindComments();
    const next = parts.next();
    next.catch(() => {});
    await parts.return!();
    await spoken.end();
    expect(outcomes()).toEqual([]);
  });
});

it('one that is left while a piece is waited for ends, and nobody is told', async () => {
  vi.useFakeTimers();
  const spoken = new Spoken();
  const begun = startOf(spoken.parts);
  await spoken.say(role);
  await vi.advanceTimersByTimeAsync(500);
  await (await begun).rest[Symbol.asyncIterator]().return!();
  expect(spoken.left).toBe(true);
});

it.each<[string, (first: Buffer, rest: Buffer) => Promise<Verdict | undefined>, object]>([
  [
    'pieces that are held are not kept twice',
    async (...pieces) => (await startOf(overwritten(...pieces))).verdict,
    refused,
  ],
  [
    'a reader that copies holds none',
    async (...pieces) => readBy(new StartReader(100), ...pieces),
    failedWith(error(500), 500),
  ],
])('%s', async (_, verdictOf, verdict) => {
  const bytes = Buffer.from(event(error(500)));
  expect(await verdictOf(bytes.subarray(0, -3), bytes.subarray(-3))).toEqual(verdict);
});

it('what breaks before it tells anything breaks here', async () => {
  const breaks = async function* () {
    yield Buffer.from(role);
    throw new Error('reset');
  };
  await expect(startOf(breaks())).rejects.toThrow('reset');
});
