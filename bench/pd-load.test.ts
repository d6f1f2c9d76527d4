/** What counts as an answer of a coordinator: all of it, and when its tokens came. */
import { once } from 'node:events';
import { createServer, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { KvError } from '@kvtier/errors';
import { expect, it, onTestFinished } from 'vitest';
import { ask, askUnlessRefused } from './pd-load.ts';

/** Answers each request as told; the header by which it says when it wants its first token. */
async function serving(answer: (response: ServerResponse, wanted: string | undefined) => unknown): Promise<string> {
  const server = createServer((request, response) => {
    request.resume();
    answer(response, request.headers['x-slo-ttft-ms'] as string | undefined);
  }).listen(0, '127.0.0.1');
  onTestFinished(() => void server.close());
  await once(server, 'listening');
  return `http://127.0.0.1:${(server.address() as AddressInfo).port}`;
}
const chunk = (...ids: number[]): string => `data: ${JSON.stringify({ choices: [{ token_ids: ids }] })}\n\n`;
const done = 'data: [DONE]\n\n';

it('the first token, and a pause for each that comes later, of an answer that is whole', async () => {
  const wants: (string | undefined)[] = [];
  const url = await serving((response, wanted) => {
    wants.push(wanted);
    response.end(`${chunk()}${chunk(7)}${chunk(8)}${chunk(9)}${done}`);
  });
  for (const answer of [
    await ask(url, 'prompt', [1, 2], 3),
    await askUnlessRefused(url, 'prompt', [1, 2], 3, { wantedMs: 250 }),
  ]) {
    expect(answer).toMatchObject({ tokens: 2, kind: 'prompt', ttftMs: expect.any(Number) });
    expect('gapsMs' in answer && answer.gapsMs).toHaveLength(2);
  }
  expect(wants).toEqual([undefined, '250']);
});

it('who is told to come again is refused, and no answer; where that is not looked for it is an error', async () => {
  const url = await serving((response) => response.writeHead(429, { 'retry-after': '1' }).end('too busy'));
  expect(await askUnlessRefused(url, 'prompt', [1], 1)).toEqual({ refused: 'too busy' });
  await expect(ask(url, 'prompt', [1], 1)).rejects.toThrow(/429 too busy$/);
});

it.each([
  ['breaks off', chunk(7) + chunk(8), /broke off, 2 of 2 tokens came$/],
  ['lacks tokens', chunk(7) + done, /broke off, 1 of 2 tokens came$/],
  ['ends with an error', `${chunk(7)}data: {"error":{"message":"lost"}}\n\n${done}`, /: lost$/],
])('an answer that %s is an error', async (_what, text, why) => {
  const url = await serving((response) => response.end(text));
  const answer = askUnlessRefused(url, 'prompt', [1], 2);
  await expect(answer).rejects.toThrow(KvError);
  await expect(answer).rejects.toThrow(why);
});
