/** What a pod's stream begins with, however its bytes are cut, and for how long it is held. */
import { afterEach, expect, it, vi } from 'vitest';
import { type Started, startOf } from './stream-start.ts';

afterEach(() => void vi.useRealTimers());

const event = (data: object | string): string => `data: ${typeof data === 'string' ? data : JSON.stringify(data)}\n\n`;
const choice = (part: object): object => ({ choices: [{ index: 0, finish_reason: null, ...part }] });
const role = event(choice({ delta: { role: 'assistant', content: '', reasoning_content: null, tool_calls: [] } }));
const token = event(choice({ delta: { content: 'é' } }));
const error = (code: unknown): object => ({ error: { message: 'EngineCore died', code } });

async function* piecesOf(pieces: readonly (string | Buffer)[]): AsyncGenerator<Buffer> {
  for (const piece of pieces) yield Buffer.from(piece);
}
const started = (...pieces: (string | Buffer)[]): Promise<Started> => startOf(piecesOf(pieces));
const allOf = async ({ rest }: Started): Promise<string> => {
  const all: Buffer[] = [];
  for await (const piece of rest) all.push(piece);
  return Buffer.concat(all).toString();
};
const goesOn = { kind: 'goes on', saysNothing: false, isRefused: false, finishReason: undefined };

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
}

it.each<[string, string, number, object]>([
  ['a role, in which case half a second shows whether its token comes, too', role, 500, goesOn],
  ['comments', ': ping\n\n', 30_000, { ...goesOn, saysNothing: true }],
])('nor for longer than clients may wait: %s', async (_, text, ms, verdict) => {
  vi.useFakeTimers();
  const spoken = new Spoken();
  const settled = vi.fn();
  const begun = startOf(spoken.parts);
  void begun.then(settled);
  await vi.advanceTimersByTimeAsync(60_000); // until its first byte it may take as long as any answer
  await spoken.say(text);
  await vi.advanceTimersByTimeAsync(ms / 2);
  if (text !== role) await spoken.say(text);
  await vi.advanceTimersByTimeAsync(ms / 2 - 1);
  expect(settled).not.toHaveBeenCalled();
  await vi.advanceTimersByTimeAsync(1);
  expect(settled.mock.calls).toMatchObject([[{ verdict }]]);
  const parts = (await begun).rest[Symbol.asyncIterator]();
  expect(String((await parts.next()).value)).toBe(text === role ? text : text + text);
  // The piece that was asked for before is the next one.
  const next = parts.next();
  await spoken.say(token);
  expect(String((await next).value)).toBe(token);
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

it('what breaks before it tells anything breaks here', async () => {
  const breaks = async function* () {
    yield Buffer.from(role);
    throw new Error('reset');
  };
  await expect(startOf(breaks())).rejects.toThrow('reset');
});
