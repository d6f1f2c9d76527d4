/** Answers behind others on their connection, on a bare server: they close when the connection does, once each, and are few. */
import { once } from 'node:events';
import { createServer, type Server, type ServerResponse } from 'node:http';
import { type AddressInfo, connect, type Socket } from 'node:net';
import { pipeline } from 'node:stream/promises';
import { setImmediate as turn } from 'node:timers/promises';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { closeQueuedAnswers } from './queued-answers.ts';

const patience = { timeout: 20_000, interval: 5 };
let server: Server;
let client: Socket;
const seen: ServerResponse[] = [];
const closed: ServerResponse[] = [];
let answer = (_response: ServerResponse): void => {};

beforeEach(async () => {
  for (const list of [seen, closed]) list.length = 0;
  answer = () => {};
  server = createServer((_request, response) => {
    seen.push(response);
    response.on('close', () => closed.push(response));
    answer(response);
  });
  closeQueuedAnswers(server, 64);
  await once(server.listen(0, '127.0.0.1'), 'listening');
  client = connect((server.address() as AddressInfo).port, '127.0.0.1');
  client.on('error', () => {});
  await once(client, 'connect');
});
afterEach(() => {
  client.destroy();
  server.close();
});

/** The server has seen it, and all that follows from it. */
async function leaves(): Promise<void> {
  const end = once(seen[0]!.req.socket, 'close');
  client.destroy();
  await end;
  await turn();
}

const ask = (count: number): void => void client.write('GET / HTTP/1.1\r\nhost: a\r\n\r\n'.repeat(count));

it('close with it, each once, whatever became of the one before', async () => {
  answer = (response) => {
    if (seen.length === 3) response.end('whole'); // and cannot go yet
    if (seen.length === 4) response.write('begun');
  };
  ask(5);
  await vi.waitUntil(() => seen.length === 5, patience);
  await leaves();
  seen[0]!.end(); // too late
  await turn();
  expect(new Set(closed)).toEqual(new Set(seen));
  expect(closed).toHaveLength(5);
  expect(seen.every(({ destroyed }) => destroyed)).toBe(true);
});

it('a pipeline into one ends', async () => {
  let failure: unknown;
  answer = (response) => {
    if (seen.length === 1) return;
    const pieces = async function* () {
      yield 'a';
      await once(response, 'close');
    };
    void pipeline(pieces, response).catch((error: unknown) => {
      failure = error;
    });
  };
  ask(2);
  await vi.waitUntil(() => seen.length === 2, patience);
  client.destroy();
  await vi.waitFor(() => expect(failure).toMatchObject({ code: 'ERR_STREAM_PREMATURE_CLOSE' }), patience);
});

it('are answered in their order where the client stays, and close as ever', async () => {
  let text = '';
  client.on('data', (part) => {
    text += part.toString();
  });
  ask(3);
  await vi.waitUntil(() => seen.length === 3, patience);
  for (const [at, response] of [...seen.entries()].reverse()) response.end(`answer ${at}`);
  await vi.waitUntil(() => closed.length === 3, patience);
  expect(text.match(/answer \d/g)).toEqual(['answer 0', 'answer 1', 'answer 2']);
  await leaves();
  expect(closed).toHaveLength(3);
});

it('of one connection there are its share; more cut it off', async () => {
  ask(16);
  await vi.waitUntil(() => seen.length === 16, patience);
  expect(client.closed).toBe(false);
  ask(1);
  await once(client, 'close');
  await vi.waitUntil(() => closed.length === seen.length, patience);
});
