/** Streams as they stand on the wire: chunks of HTTP/1.1 by their bytes, one answer after another on one connection, and HTTP/1.0. */
import { createServer, type ServerResponse } from 'node:http';
import { type AddressInfo, connect } from 'node:net';
import { say } from '@kvtier/registry/testing';
import { expect, it } from 'vitest';
import { EventStream } from './sse.ts';
import { Harness, ids } from './testing/harness.ts';

const at = new Harness();
const told = 'é 日 😀 34';

function asked(version: string, headers = ''): string {
  const body = JSON.stringify({ prompt: 'a', stream: true });
  const head = `POST /v1/completions HTTP/${version}\r\nhost: localhost\r\ncontent-type: application/json\r\n${headers}`;
  return `${head}content-length: ${body.length}\r\n\r\n${body}`;
}

/** All that comes until the server closes the connection. */
function answersTo(text: string, port = Number(new URL(at.server.url).port)): Promise<Buffer> {
  return new Promise((resolve, reject) => {
    const parts: Buffer[] = [];
    const socket = connect(port, '127.0.0.1', () => socket.write(text));
    socket.on('data', (part) => parts.push(part));
    socket.once('end', () => resolve(Buffer.concat(parts)));
    socket.once('error', reject);
  });
}

/** A body's chunks, and what follows it. */
function unchunked(bytes: Buffer): { readonly body: string; readonly rest: Buffer } {
  const parts: Buffer[] = [];
  for (let at = 0; ; ) {
    const end = bytes.indexOf('\r\n', at);
    const size = Number.parseInt(bytes.subarray(at, end).toString(), 16);
    expect(bytes.subarray(end + 2 + size, end + 4 + size).toString()).toBe('\r\n');
    if (size === 0) return { body: Buffer.concat(parts).toString(), rest: bytes.subarray(end + 4) };
    parts.push(bytes.subarray(end + 2, end + 2 + size));
    at = end + 4 + size;
  }
}

function textOf(body: string): string {
  const events = body.split('\n\n').filter((event) => event !== '');
  expect(events.pop()).toBe('data: [DONE]');
  return events.map((event) => JSON.parse(event.slice('data: '.length)).choices[0].text).join('');
}

it('answers that were asked for one after another, before the first has come, come one after another', async () => {
  at.engine.script = say(ids(told), 'length');
  let rest = await answersTo(asked('1.1') + asked('1.1', 'connection: close\r\n'));
  for (let answer = 0; answer < 2; answer++) {
    const bodyAt = rest.indexOf('\r\n\r\n') + 4;
    expect(rest.subarray(0, bodyAt).toString()).toMatch(/^HTTP\/1.1 200 OK\r\n.*transfer-encoding: chunked/is);
    const read = unchunked(rest.subarray(bodyAt));
    expect(textOf(read.body)).toBe(told);
    rest = read.rest;
  }
  expect(rest).toHaveLength(0);
});

it('a client of HTTP/1.0 gets no chunks', async () => {
  at.engine.script = say(ids(told), 'length');
  const answer = (await answersTo(asked('1.0'))).toString();
  expect(answer).not.toMatch(/transfer-encoding/i);
  expect(textOf(answer.slice(answer.indexOf('\r\n\r\n') + 4))).toBe(told);
});

it.each([
  ['waits for its turn', 'sendInTurn'],
  ['is under way', 'send'],
] as const)('nothing is written behind an end that %s: the connection’s next answer is whole', async (_, sent) => {
  const late: Promise<unknown>[] = [];
  const answer = async (response: ServerResponse): Promise<void> => {
    const events = new EventStream(response, '1', { unreadMs: 20_000, taken: () => {}, headers: {} });
    const sendLate = (): void => {
      for (const sent of [events.send([{ late: 1 }]), events.sendText('{"late":2}'), events.sendInTurn([{ late: 3 }])])
        late.push(Promise.resolve(sent).catch((why) => why.code));
      late.push(Promise.resolve(events.end([{ late: 4 }])));
    };
    const large = events[sent]([{ text: 'x'.repeat(4 << 20) }]);
    const failed = events.fail({ error: 'one' });
    sendLate(); // and again while it is written, and when it is
    await large;
    sendLate();
    await failed;
    sendLate();
  };
  let answered: Promise<void> | undefined;
  const server = createServer(({ url }, response) => {
    if (url === '/next') response.end('next');
    else answered = answer(response);
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const get = (path: string, more = ''): string => `GET ${path} HTTP/1.1\r\nhost: localhost\r\n${more}\r\n`;
  const { port } = server.address() as AddressInfo;
  const bytes = await answersTo(get('/') + get('/next', 'connection: close\r\n'), port);
  await answered; // the client may have read all before it has told itself
  server.close();
  const { body, rest } = unchunked(bytes.subarray(bytes.indexOf('\r\n\r\n') + 4));
  expect(body.slice(-40)).toMatch(/x"}\n\ndata: {"error":"one"}\n\n$/);
  expect(rest.toString()).toMatch(/^HTTP\/1.1 200 OK\r\n.*\r\n\r\nnext$/s);
  const refused = ['CANCELLED', 'CANCELLED', 'CANCELLED', undefined];
  expect(await Promise.all(late)).toEqual([...refused, ...refused, ...refused]);
});
