/** Streams whose large chunks wait for a slow reader: nothing overtakes them, and nothing of them is lost. */
import { once } from 'node:events';
import { createServer, get, type IncomingMessage, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import type { FastifyReply } from 'fastify';
import { expect, it } from 'vitest';
import type { Delta, Totals } from './plan.ts';
import { silent } from './testing/harness.ts';
import { type Generate, stream, type Written } from './written-answers.ts';

const echo = 'x'.repeat(1 << 20);
/** More echoes than stand between two sockets. */
const many = Array.from({ length: 8 }, (_, index) => index);
const totals = { promptTokens: 1, completionTokens: 3, tokensByTier: {} } as unknown as Totals;
const delta = (index: number, text: string, part: Partial<Delta> = {}): Delta => ({
  ...{ index, text, tokenIds: [], first: true, finishReason: null },
  ...part,
});

/** One stream to a client that reads when it is told to. `run` returns when what it has said is not to be awaited. */
async function streamed(run: Generate, taken: () => void = () => {}) {
  const server = createServer();
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const request = get({ port: (server.address() as AddressInfo).port, agent: false });
  const [, raw] = (await once(server, 'request')) as [IncomingMessage, ServerResponse];
  const job = {
    endpoint: 'completion',
    head: { id: 'cmpl-1', created: 1, model: 'demo' },
    plan: { requestId: '1', params: { includeUsage: false, returnTokenIds: false } },
    placed: { headers: () => ({}) },
    echoes: many.map(() => echo),
  } as unknown as Written;
  const reply = { hijack: () => {}, raw, request: { id: '1' } } as unknown as FastifyReply;
  const ended = stream(job, reply, run, { logger: silent, unreadMs: 20_000, taken });
  const [response] = (await once(request, 'response')) as [IncomingMessage];
  response.on('error', () => {}); // the client that leaves
  server.close();
  return { response, ended };
}

type Choice = { readonly index: number; readonly text: string; readonly finish_reason: string | null };
/** What each event says, by its length where it is an echo; the rest as it stands. */
async function read(response: IncomingMessage): Promise<unknown[]> {
  const said = ({ index, text, finish_reason }: Choice) => [
    ...[index, text.startsWith(echo) ? `echo${text.slice(echo.length)}` : text],
    ...(finish_reason === null ? [] : [finish_reason]),
  ];
  const events: unknown[] = [];
  let text = '';
  for await (const part of response.setEncoding('latin1')) {
    const whole = (text + part).split('\n\n');
    text = whole.pop()!;
    for (const event of whole) {
      const json = event.slice('data: '.length);
      const told = json === '[DONE]' ? json : JSON.parse(json);
      events.push(told.choices ? said(told.choices[0]) : told);
    }
  }
  return events;
}

it('all answers are over while their first and last chunks wait: each is written, and then the end', async () => {
  const { response, ended } = await streamed(async (onDelta) => {
    for (const index of many) void onDelta(delta(index, ' a', { finishReason: 'length' }));
    return totals;
  });
  expect(await read(response)).toEqual([...many.map((index) => [index, 'echo a', 'length']), '[DONE]']);
  await ended;
});

it('an answer goes on at another worker while its first chunk waits: what follows does not overtake it', async () => {
  const { response } = await streamed(async (onDelta) => {
    for (const index of many) void onDelta(delta(index, ''));
    await onDelta(delta(7, ' b', { first: false }));
    for (const index of many) await onDelta(delta(index, ' c', { first: false, finishReason: 'length' }));
    return totals;
  });
  const ends = many.map((index) => [index, ' c', 'length']);
  expect(await read(response)).toEqual([...many.map((index) => [index, 'echo']), [7, ' b'], ...ends, '[DONE]']);
});

it('a client that takes what waits is noticed, also when all is said', async () => {
  let isSaid = false;
  let taken = 0;
  const run: Generate = async (onDelta) => {
    for (const index of many) void onDelta(delta(index, '', { finishReason: 'length' }));
    isSaid = true;
    return totals;
  };
  const { response, ended } = await streamed(run, () => {
    if (isSaid) taken++;
  });
  expect(taken).toBeLessThan(many.length);
  await read(response);
  await ended;
  expect(taken).toBeGreaterThan(0);
});

it('a failure is told behind what waits', async () => {
  const { response } = await streamed(async (onDelta) => {
    for (const index of many) void onDelta(delta(index, ''));
    throw new Error('a defect');
  });
  const failure = { error: expect.objectContaining({ code: 'internal_error' }) };
  expect(await read(response)).toEqual([...many.map((index) => [index, 'echo']), failure]);
});

it('a client that leaves ends all that waits', async () => {
  const waiting: Promise<unknown>[] = [];
  const { response, ended } = await streamed(async (onDelta) => {
    for (const index of many) waiting.push(Promise.resolve(onDelta(delta(index, ''))).catch((why) => why.code));
    return totals;
  });
  response.destroy();
  await ended;
  expect((await Promise.all(waiting)).at(-1)).toBe('CANCELLED');
});
