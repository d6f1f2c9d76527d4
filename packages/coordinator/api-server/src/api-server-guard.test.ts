/** Who is not answered, and what one client cannot take from the others. */
import { connect, type Socket } from 'node:net';
import { event, say } from '@kvtier/registry/testing';
import { describe, expect, it, vi } from 'vitest';
import { Harness, ids, jsonOf } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const port = (): number => Number(new URL(at.server.url).port);

/** Status and code of the answer to a request with exactly these headers. */
async function told(line: string, headers: Readonly<Record<string, string>>, body = ''): Promise<[number, string]> {
  const head = Object.entries({ connection: 'close', ...headers }).map(([name, value]) => `${name}: ${value}\r\n`);
  const answer = await at.rawRequest(
    `${line} HTTP/1.1\r\n${head.join('')}content-length: ${body.length}\r\n\r\n${body}`,
  );
  const text = answer.slice(answer.indexOf('\r\n\r\n') + 4);
  return [Number(answer.slice(9, 12)), text.startsWith('{') ? (JSON.parse(text).error?.code ?? '') : ''];
}

describe('a page of elsewhere', () => {
  const own = (): string => `127.0.0.1:${port()}`;

  it('that made its own name point here (DNS rebinding) gets nothing', async () => {
    for (const host of [
      'evil.example',
      `evil.example:${port()}`,
      '127.0.0.1.evil.example',
      'localhost.evil.example',
      '',
    ]) {
      for (const line of ['GET /v1/models', 'GET /metrics', 'GET /health', 'POST /admin/reset_prefix_cache']) {
        expect(await told(line, { host }), `${line} ${host}`).toEqual([403, 'host_not_allowed']);
      }
    }
    expect(at.engine.resets).toBe(0);
    for (const host of [own(), `localhost:${port()}`, 'LOCALHOST', `[::1]:${port()}`, '127.0.0.1']) {
      expect(await told('GET /v1/models', { host })).toEqual([200, '']);
    }
  });

  it('resets no cache, pins nothing, asks nothing: whatever a browser says of it', async () => {
    const pages = [
      { origin: 'https://evil.example', 'sec-fetch-site': 'cross-site' },
      { origin: 'https://evil.example' },
      { origin: 'null' },
      { origin: `http://127.0.0.1:${port() + 1}`, 'sec-fetch-site': 'same-site' },
      { origin: `https://${own()}` },
      { 'sec-fetch-site': 'cross-site' },
      { 'sec-fetch-site': 'nonsense' },
    ];
    const json = { 'content-type': 'application/json' };
    for (const page of pages) {
      const headers = { host: own(), ...page };
      expect(await told('POST /admin/reset_prefix_cache', headers)).toEqual([403, 'cross_site']);
      expect(await told('POST /admin/pin_prefix', { ...headers, ...json }, '{"name":"a","prompt":"b"}')).toEqual([
        403,
        'cross_site',
      ]);
      expect(await told('POST /v1/completions', { ...headers, ...json }, '{"prompt":"a"}')).toEqual([
        403,
        'cross_site',
      ]);
      expect(await told('GET /v1/models', headers)).toEqual([403, 'cross_site']);
    }
    expect([at.engine.resets, at.engine.pins.length, at.engine.seen.length]).toEqual([0, 0, 0]);
    for (const page of [{ origin: `http://${own()}`, 'sec-fetch-site': 'same-origin' }, { 'sec-fetch-site': 'none' }]) {
      expect(await told('GET /v1/models', { host: own(), ...page })).toEqual([200, '']);
    }
  });
});

describe('a client that never reads', () => {
  it.each(['whole', 'streamed'])('is cut off, when its answer is %s', async (how) => {
    at.engine.description = { ...at.engine.description, maxModelTokens: 131_072 };
    await at.open({ limits: { unreadMs: 300 } });
    const [word, count] = [' Photographer', 100_000];
    // More than the kernel takes for it: 26 MB of answers, or 52 MB of echoes, which only a stream may have.
    const isStreamed = how === 'streamed';
    at.engine.script = say(ids(' 34'), 'length');
    if (!isStreamed)
      at.engine.script = (call) => {
        call.write(event({ tokenIds: Array<number>(count).fill(ids(word)[0]!), finishReason: 'length' }));
        call.end();
      };
    const body = JSON.stringify(
      isStreamed
        ? { prompt: word.repeat(count), echo: true, n: 40, stream: true }
        : { prompt: 'a', max_tokens: count, n: 20 },
    );
    const socket = connect(port(), '127.0.0.1').pause();
    socket.on('error', () => {});
    const closed = new Promise((resolve) => socket.once('close', resolve));
    socket.write(
      `POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`,
    );
    await vi.waitUntil(async () => /status="499"} 1\n/.test(await at.metricsText()), patience);
    await vi.waitUntil(async () => (await at.metricsText()).includes('kvtier_requests_running 0'), patience);
    socket.resume();
    await closed;
  });
});

it('128 answers of one request, without a warning', async () => {
  const warnings: Error[] = [];
  const keep = (warning: Error): void => void warnings.push(warning);
  process.on('warning', keep);
  at.engine.script = say(ids(' 34'), 'length');
  const answer = await at.client.completions.create({ model: 'demo', prompt: 'a', n: 128 });
  const streamed = await at.post('/v1/completions', { prompt: 'a', n: 128, stream: true });
  await streamed.text();
  await new Promise((resolve) => setImmediate(resolve)); // warnings come a tick later
  process.off('warning', keep);
  expect(answer.choices).toHaveLength(128);
  expect(warnings).toEqual([]);
});

describe('large bodies', () => {
  const large = JSON.stringify({ prompt: ' a'.repeat(100_000) });
  const head = (length: number): string =>
    `POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: ${length}\r\n\r\n`;
  const begin = async (): Promise<Socket> => {
    const socket = connect(port(), '127.0.0.1');
    socket.on('error', () => {});
    await new Promise((resolve) => socket.write(head(large.length) + large.slice(0, 150_000), resolve));
    return socket;
  };
  const answerOf = (socket: Socket): Promise<string> =>
    new Promise((resolve) => socket.once('data', (bytes) => resolve(bytes.toString())));

  it('have a number of places; who is slow gives its place up, small ones need none', async () => {
    await at.open({ limits: { largeBodies: 1, largeBodyMs: 500 } });
    at.engine.script = say(ids(' 34'), 'length');
    const slow = await begin();
    const toldSlow = answerOf(slow);
    const waiting = at.post('/v1/completions', large);
    expect((await at.post('/v1/completions', { prompt: 'a' })).status).toBe(200);
    // The second body waits as long as the first may take: one of the two ends is told first, both are bounded.
    expect(await toldSlow).toMatch(/^HTTP\/1\.1 408 .*connection: close.*"body_too_slow"/s);
    const { status } = await waiting.catch(() => ({ status: 429 }));
    expect([400, 429]).toContain(status);
    // The place is free again.
    expect(await jsonOf(await at.post('/v1/completions', large))).toMatchObject({
      error: { code: 'context_length_exceeded' },
    });
    slow.destroy();
  });

  it('of clients that leave are forgotten, whether they had a place or waited for one', async () => {
    await at.open({ limits: { largeBodies: 1, largeBodyMs: 60_000 } });
    const sockets = [await begin(), await begin(), await begin()];
    for (const socket of sockets) socket.destroy();
    expect((await at.post('/v1/completions', large)).status).toBe(400);
  });

  it('are refused above the limit, told by their length or counted', async () => {
    await at.open({ limits: { bodyBytes: 100_000 } });
    expect(
      await told('POST /v1/completions', { host: '127.0.0.1', 'content-type': 'application/json' }, large),
    ).toEqual([413, 'request_too_large']);
    const pieces = Array.from({ length: 20 }, () => 'x'.repeat(10_000));
    const chunked = `${pieces.map((piece) => `${piece.length.toString(16)}\r\n${piece}\r\n`).join('')}0\r\n\r\n`;
    const answer = await at.rawRequest(
      `POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n${chunked}`,
    );
    expect(answer).toMatch(/^HTTP\/1\.1 413 /);
  });
});

it('more messages than the model has tokens, too many names, too deep: refused in one line', async () => {
  const refusal = async (path: string, body: string): Promise<string> =>
    (await jsonOf(await at.post(path, body))).error.code;
  const message = '{"role":"user","content":""}';
  const messages = (count: number): string => `{"messages":[${Array<string>(count).fill(message).join()}]}`;
  expect(await refusal('/v1/chat/completions', messages(4_097))).toBe('context_length_exceeded');
  expect(await refusal('/v1/chat/completions', messages(20_000))).toBe('body_too_complex');
  const names = Array.from({ length: 50_000 }, (_, at) => `"k${at}":1`).join();
  expect(await refusal('/v1/completions', `{${names}}`)).toBe('body_too_complex');
  expect(await refusal('/v1/completions', `{"prompt":${'['.repeat(100_000)}`)).toBe('body_too_complex');
  const long = await at.post('/v1/completions', { [`k${'x'.repeat(100_000)}`]: 1 });
  expect((await long.text()).length).toBeLessThan(5_000);
});
