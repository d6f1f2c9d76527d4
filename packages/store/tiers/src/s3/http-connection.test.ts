/** Our HTTP client against a plain server on the loopback: answers cut anywhere, limits, and bodies that land where they belong. */
import { createServer, type Server, type Socket } from 'node:net';
import { native } from '@kvtier/data-plane';
import fc from 'fast-check';
import { afterEach, expect, it } from 'vitest';
import { watchReceiving } from '../kit/testing/receiving.ts';
import { type Head, headIn } from './answers.ts';
import type { HttpRequest } from './http-connection.ts';
import { HttpPool } from './http-pool.ts';

const ends: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0)) await end();
});

/** `answer` is called with each whole request head (and body, by its content-length). */
async function poolTo(answer: (socket: Socket, request: Buffer) => void): Promise<HttpPool> {
  const sockets = new Set<Socket>();
  const server: Server = createServer((socket) => {
    sockets.add(socket);
    let got = Buffer.alloc(0);
    socket.on('error', () => {});
    socket.on('data', (chunk) => {
      got = Buffer.concat([got, chunk]);
      const end = got.indexOf('\r\n\r\n');
      if (end === -1) return;
      const bytes = end + 4 + Number(/content-length: (\d+)/i.exec(got.toString('latin1', 0, end))?.[1] ?? 0);
      if (got.length < bytes) return;
      const request = got.subarray(0, bytes);
      got = got.subarray(bytes);
      answer(socket, request);
    });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  const { port } = server.address() as { port: number };
  const pool = new HttpPool({ tls: false, host: '127.0.0.1', port }, 2);
  ends.push(async () => {
    pool.close();
    for (const socket of sockets) socket.destroy();
    await new Promise((resolve) => server.close(resolve));
  });
  return pool;
}

const limits = () => ({ deadlineMs: performance.now() + 10_000, idleMs: 5_000 });
const get = (targets: readonly Buffer[] = []): HttpRequest => ({
  method: 'GET',
  path: '/x',
  headers: {},
  body: [],
  targets,
});

it('puts a body into its targets, wherever the answer is cut', async () => {
  const body = Buffer.from(Array.from({ length: 300 }, (_, i) => i % 251));
  const text = Buffer.concat([Buffer.from('HTTP/1.1 206 Partial\r\nContent-Length: 300\r\nETag: "e"\r\n\r\n'), body]);
  let cut = 1;
  const pool = await poolTo((socket) => {
    const at = cut;
    socket.write(text.subarray(0, at), () => setImmediate(() => socket.write(text.subarray(at))));
  });
  for (cut = 1; cut < text.length; cut += 13) {
    const targets = [Buffer.alloc(100), Buffer.alloc(1), Buffer.alloc(199)];
    const reply = await pool.send(get(targets), limits());
    expect(reply.status).toBe(206);
    expect(reply.headers.get('etag')).toBe('"e"');
    expect(Buffer.concat(targets).equals(body)).toBe(true);
  }
});

it('receives a body into the memory of its targets; elsewhere goes what came in one read with the head', async () => {
  const memory = new ArrayBuffer(200_000);
  const target = Buffer.from(memory);
  const body = Buffer.alloc(memory.byteLength, 'b');
  const receiving = watchReceiving();
  ends.push(async () => receiving.end());
  const pool = await poolTo((socket) => {
    socket.write(Buffer.concat([Buffer.from('HTTP/1.1 200 OK\r\nContent-Length: 200000\r\n\r\n'), body]));
  });
  await pool.send(get([target]), limits());
  expect(target.equals(body)).toBe(true);
  const [head, ...rest] = receiving.buffers;
  const last = rest.pop(); // after the answer: for a head again
  expect([head!.length, last!.length]).toEqual([4096, 4096]);
  expect(rest.length).toBeGreaterThan(0);
  expect(rest.filter(({ buffer }) => buffer !== memory).length).toBe(0);
});

it('sends bodies of several views, and keeps the connection', async () => {
  const seen: Buffer[] = [];
  const ports = new Set<number | undefined>();
  const pool = await poolTo((socket, request) => {
    seen.push(request);
    ports.add(socket.remotePort);
    socket.write('HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n');
  });
  const body = [Buffer.alloc(3 << 20, 'a'), Buffer.alloc(10, 'b')];
  const headers = { 'content-length': String((3 << 20) + 10) };
  for (let i = 0; i < 3; i++) await pool.send({ method: 'PUT', path: '/x', headers, body, targets: [] }, limits());
  for (const request of seen) expect(request.subarray(-(3 << 20) - 10).equals(Buffer.concat(body))).toBe(true);
  expect(ports.size).toBe(1);
});

it.each([
  ['another length than asked for', 'HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello', 'PROTOCOL'],
  ['no HTTP', 'SSH-2.0\r\n\r\n', 'PROTOCOL'],
  ['a body that ends early', 'HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhe', 'DISCONNECTED'],
  ['more than announced', 'HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhello', 'PROTOCOL'],
  ['nothing', '', 'DISCONNECTED'],
])('%s is %s', async (_, text, code) => {
  const pool = await poolTo((socket) => socket.end(text));
  await expect(pool.send(get([Buffer.alloc(4)]), limits())).rejects.toMatchObject({ code });
});

it('an error’s body goes into the reply, not into the targets', async () => {
  const pool = await poolTo((socket) => socket.write('HTTP/1.1 404 No\r\nContent-Length: 4\r\n\r\ngone'));
  const target = Buffer.alloc(4);
  const reply = await pool.send(get([target]), limits());
  expect([reply.status, reply.body.toString(), target.toString('hex')]).toEqual([404, 'gone', '00000000']);
});

it('a server that is silent costs the limit and the connection; who waits for one is not kept longer', async () => {
  const pool = await poolTo((socket) => socket.write('HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nhe'));
  const target = Buffer.alloc(4);
  const sends = Array.from({ length: 4 }, () =>
    pool.send(get([target]), { deadlineMs: performance.now() + 150, idleMs: 5_000 }).catch((error) => error.code),
  );
  expect(await Promise.all(sends)).toEqual(['DEADLINE', 'DEADLINE', 'DEADLINE', 'DEADLINE']);
  await expect(pool.send(get([target]), { ...limits(), idleMs: 50 })).rejects.toThrow('nothing moved for 50 ms');
});

it.each([
  '-5',
  '1.5',
  '5e0',
  '0x5',
  ' ',
  '',
  '5 5',
  '+5',
  'NaN',
  'Infinity',
  '9007199254740993',
  '99999999999999999999',
])('a length of %j is no length, for a body that goes to targets or not', async (length) => {
  const pool = await poolTo((socket) => socket.write(`HTTP/1.1 404 No\r\nContent-Length: ${length}\r\n\r\nhello`));
  for (const targets of [[], [Buffer.alloc(4)]]) {
    await expect(pool.send(get(targets), limits())).rejects.toMatchObject({ code: 'PROTOCOL' });
  }
});

it('whatever a server says is an answer or a KvError, and nothing of it lands beside the targets', async () => {
  let text = Buffer.alloc(0);
  const pool = await poolTo((socket) => socket.end(text));
  const line = fc.oneof(
    fc.constantFrom(
      'HTTP/1.1 200 OK',
      'HTTP/1.1 206 P',
      'HTTP/1.1 404 No',
      'HTTP/1.1 100 Go on',
      'HTTP/1.1 204 None',
      'HTTP/1.0 200 OK',
    ),
    fc.constantFrom(
      'Transfer-Encoding: chunked',
      'Connection: close',
      'Content-Length: 8',
      'Content-Length: 3',
      'x',
      ': 5',
      '',
    ),
    fc.oneof(fc.double(), fc.integer(), fc.string({ maxLength: 12 })).map((value) => `Content-Length: ${value}`),
    fc.string({ maxLength: 30 }),
  );
  const property = fc.asyncProperty(
    fc.array(line, { maxLength: 8 }),
    fc.string({ maxLength: 20 }),
    fc.boolean(),
    async (lines, body, toTarget) => {
      text = Buffer.from(`${lines.join('\r\n')}\r\n\r\n${body}`);
      const memory = Buffer.alloc(24, 0xee);
      const targets = toTarget ? [memory.subarray(8, 12), memory.subarray(12, 16)] : [];
      const ended = await pool.send(get(targets), limits()).then(
        ({ status }) => `${status}`,
        (error) => error.name,
      );
      expect(ended).toMatch(/^(\d{3}|KvError)$/);
      expect(Buffer.concat([memory.subarray(0, 8), memory.subarray(16)]).equals(Buffer.alloc(16, 0xee))).toBe(true);
    },
  );
  await fc.assert(property, { numRuns: 200 });
});

it('a line of blanks in an answer’s head costs no more than its length', async () => {
  const line = (blanks: number): string => `x-blank: a${' '.repeat(blanks)}b`;
  const took = (blanks: number): number => {
    const text = `HTTP/1.1 200 OK\r\n${line(blanks)}`;
    const beganMs = native.threadCpuMs();
    for (let round = 0; round < 20; round++) expect(headIn(text)).toMatchObject({ status: 200 });
    return native.threadCpuMs() - beganMs;
  };
  took(1_000);
  expect(took(30_000)).toBeLessThan(400); // by the square of it: 20 times 600 ms
  const head = headIn('HTTP/1.1 200 OK\r\nETag:  "e" \r\nEmpty:') as Head;
  expect([...head.headers]).toEqual([
    ['etag', '"e"'],
    ['empty', ''],
  ]);
  for (const none of ['no colon', ': no name', 'two words: x'])
    expect(headIn(`HTTP/1.1 200 OK\r\n${none}`)).toMatch(/no header$/);
});

it('a small body in chunks goes into the reply, wherever the answer is cut', async () => {
  const body = '<Error><Code>RequestTimeTooSkewed</Code></Error>';
  const [a, b] = [body.slice(0, 20), body.slice(20)];
  const head = 'HTTP/1.1 403 No\r\nTransfer-Encoding: chunked\r\n\r\n';
  const text = `${head}14\r\n${a}\r\n${b.length.toString(16).toUpperCase()};x=1\r\n${b}\r\n0\r\nx-more: 1\r\n\r\n`;
  let cut = 1;
  const pool = await poolTo((socket) => {
    const at = cut;
    socket.write(text.slice(0, at), () => setImmediate(() => socket.write(text.slice(at))));
  });
  for (cut = 1; cut < text.length; cut += 7) {
    const target = Buffer.alloc(4);
    const reply = await pool.send(get([target]), limits());
    expect([reply.status, reply.body.toString(), target.toString('hex')]).toEqual([403, body, '00000000']);
  }
});

it.each([
  ['ends early', '5\r\nhe', 'DISCONNECTED'],
  ['has a length that is none', 'five\r\nhello\r\n0\r\n\r\n', 'PROTOCOL'],
  ['is longer than it says', '4\r\nhello\r\n0\r\n\r\n', 'PROTOCOL'],
  ['has a length without an end', '1'.repeat(300), 'PROTOCOL'],
  ['is for targets', '5\r\nhello\r\n0\r\n\r\n', 'PROTOCOL', [Buffer.alloc(5)]],
])('a body in chunks that %s is no answer', async (_, chunks, code, targets: Buffer[] = []) => {
  const pool = await poolTo((socket) => socket.end(`HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n${chunks}`));
  await expect(pool.send(get(targets), limits())).rejects.toMatchObject({ code });
});

it('of a body in chunks that is too large the status is the answer', async () => {
  const chunk = `1000\r\n${'x'.repeat(4096)}\r\n`;
  const pool = await poolTo((socket) => {
    socket.write(`HTTP/1.1 500 No\r\nTransfer-Encoding: chunked\r\n\r\n${chunk.repeat(17)}`);
  });
  const reply = await pool.send(get(), limits());
  expect([reply.status, reply.body.length]).toEqual([500, 0]);
});
