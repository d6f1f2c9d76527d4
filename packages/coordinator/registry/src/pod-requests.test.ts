/** Requests to one pod: what goes there, and one that says nothing of an answer for as long as it may, which no other pod is to compute. */
import { once } from 'node:events';
import { createServer, type Server, type ServerResponse } from 'node:http';
import type { AddressInfo } from 'node:net';
import { Readable } from 'node:stream';
import { type Dispatcher, errors, Pool } from 'undici';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
import { type Forwarded, PodRequests } from './pod-requests.ts';

let requests: PodRequests;
let ended: number;
beforeEach(() => {
  ended = 0;
  requests = new PodRequests(
    { name: 'a', origin: new URL('http://127.0.0.1:9'), access: undefined },
    100,
    () => ended++,
  );
});
afterEach(async () => {
  vi.restoreAllMocks();
  await requests.close();
});
const ask = () => requests.forward('/v1/completions', {}, '{}', new AbortController().signal);
const late = {
  code: 'DEADLINE',
  retry: false,
  message: 'worker a: said nothing of an answer for 600 s; ask for a stream, or for fewer tokens',
};

it('before it begins', async () => {
  vi.spyOn(Pool.prototype, 'request').mockRejectedValue(new errors.HeadersTimeoutError());
  await expect(ask()).rejects.toMatchObject(late);
  expect([requests.size, ended]).toEqual([0, 1]);
});

it('in its midst', async () => {
  const body = Readable.from(
    (async function* () {
      yield Buffer.from('a');
      throw new errors.BodyTimeoutError();
    })(),
  );
  const answer = { statusCode: 200, headers: {}, body } as unknown as Dispatcher.ResponseData;
  vi.spyOn(Pool.prototype, 'request').mockResolvedValue(answer);
  const parts = (await ask()).body[Symbol.asyncIterator]();
  expect(String((await parts.next()).value)).toBe('a');
  await expect(parts.next()).rejects.toMatchObject(late);
  expect([requests.size, ended]).toEqual([0, 1]);
});

describe('at a server', () => {
  let server: Server;
  let there: PodRequests;
  beforeEach(async () => {
    server = createServer().listen(0, '127.0.0.1');
    await once(server, 'listening');
    const origin = new URL(`http://127.0.0.1:${(server.address() as AddressInfo).port}`);
    there = new PodRequests({ name: 'a', origin, access: undefined }, 5_000, () => ended++);
  });
  afterEach(async () => {
    await there.close();
    server.closeAllConnections();
    server.close();
  });
  const post = (body: Uint8Array | string) => there.forward('/v1/completions', {}, body, AbortSignal.timeout(20_000));
  const wholeOf = async ({ body }: Forwarded): Promise<string> => {
    let text = '';
    for await (const part of body) text += part.toString();
    return text;
  };

  it.each([
    ['', 0],
    ['é', 2],
    [new Uint8Array(1 << 20).fill(97), 1 << 20],
  ])('a body goes with its length, in one piece', async (body, bytes) => {
    server.on('request', async (request, response) => {
      let text = '';
      for await (const part of request.setEncoding('utf8')) text += part;
      const { 'content-length': length, 'transfer-encoding': encoding = 'none' } = request.headers;
      response.end(`${length} ${encoding} ${text}`);
    });
    expect(await wholeOf(await post(body))).toBe(`${bytes} none ${Buffer.from(body as string).toString()}`);
    // The same connection takes another one.
    expect(await wholeOf(await post('{}'))).toBe('2 none {}');
  });

  it('comments alone say nothing of the pod before more has come', async () => {
    const outcomes: (string | undefined)[] = [];
    const { port } = server.address() as AddressInfo;
    await there.close();
    there = new PodRequests(
      { name: 'a', origin: new URL(`http://127.0.0.1:${port}`), access: undefined },
      ...([5_000, () => ended++, (failure?: string) => void outcomes.push(failure)] as const),
    );
    let stream: ServerResponse | undefined;
    server.on('request', (_, response) => {
      stream = response.writeHead(200, { 'content-type': 'text/event-stream' });
      stream.flushHeaders();
    });
    // Its time is over with its first comment.
    const now = performance.now.bind(performance);
    let laterMs = 0;
    vi.spyOn(performance, 'now').mockImplementation(() => now() + laterMs);
    const silent = async (): Promise<AsyncIterator<Buffer>> => {
      stream = undefined;
      const asked = post('{}');
      await vi.waitUntil(() => stream !== undefined, { timeout: 20_000 });
      laterMs += 30_000;
      stream!.write(': ping\n\n');
      const parts = (await asked).body[Symbol.asyncIterator]();
      expect(String((await parts.next()).value)).toBe(': ping\n\n');
      return parts;
    };
    const whole = await silent();
    expect(outcomes).toEqual([]);
    stream!.write('data: {"choices":[{"text":"a"}]}\n\n');
    await whole.next();
    expect(outcomes).toEqual([undefined]);
    stream!.end();
    expect(await whole.next()).toMatchObject({ done: true });
    const ending = await silent();
    stream!.end();
    await ending.next();
    const failing = await silent();
    stream!.write('data: {"error":{"code":503}}\n\n');
    await failing.next();
    stream!.end();
    await failing.next();
    const breaking = await silent();
    stream!.destroy();
    await expect(breaking.next()).rejects.toMatchObject({ code: 'DISCONNECTED' });
    expect(outcomes).toEqual([
      undefined,
      undefined,
      '/v1/completions answers 503 in its first event',
      expect.any(String),
    ]);
  });

  it('who answers before it has read all of a body is heard', async () => {
    server.on('request', (_, response) => void response.writeHead(413).end('too large'));
    const answer = await post(new Uint8Array(64 << 20));
    expect([answer.status, await wholeOf(answer)]).toEqual([413, 'too large']);
    await vi.waitFor(() => expect([there.size, ended]).toEqual([0, 1]), { timeout: 20_000 });
  });
});
