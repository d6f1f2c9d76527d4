/** The RESP2 reader against a peer that cuts its answers anywhere: what arrives is the same. */
import { createServer, type Server } from 'node:net';
import fc from 'fast-check';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { watchReceiving } from '../kit/testing/receiving.ts';
import { type MoveResult, PieceConnection } from './piece-connection.ts';
import { PiecePool } from './piece-pool.ts';

let server: Server;
let port: number;
/** What the peer says to a connection: pieces, each sent when the one before is out. */
let pieces: Buffer[];
beforeEach(async () => {
  server = createServer((socket) => {
    socket.setNoDelay(true);
    socket.on('error', () => {});
    socket.once('data', () => {
      const next = (at: number): void => {
        if (at < pieces.length) socket.write(pieces[at]!, () => setImmediate(next, at + 1));
      };
      next(0);
    });
  });
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  port = (server.address() as { port: number }).port;
});
afterEach(() => new Promise((resolve) => server.close(resolve)));

const answer = fc.oneof(
  fc
    .uint8Array({ minLength: 1, maxLength: 300 })
    .map((bytes) => ({ kind: 'value' as const, bytes: Buffer.from(bytes) })),
  fc
    .uint8Array({ minLength: 1, maxLength: 300 })
    .map((bytes) => ({ kind: 'length' as const, bytes: Buffer.from(bytes) })),
  fc.constantFrom(
    { kind: 'none' as const },
    { kind: 'empty' as const },
    { kind: 'error' as const },
    { kind: 'set' as const },
  ),
);

it('values land whole in their views, in order, however the answers are cut', async () => {
  const property = fc.asyncProperty(
    fc.array(answer, { minLength: 1, maxLength: 8 }),
    fc.array(fc.integer({ min: 1, max: 90 }), { minLength: 1 }),
    async (answers, cuts) => {
      const text = Buffer.concat(
        answers.flatMap((each) => {
          if (each.kind === 'none') return [Buffer.from('$-1\r\n')];
          if (each.kind === 'empty') return [Buffer.from('$0\r\n\r\n')];
          if (each.kind === 'error') return [Buffer.from('-MOVED 1 a:2\r\n')];
          if (each.kind === 'set') return [Buffer.from('+OK\r\n')];
          return [Buffer.from(`$${each.bytes.length}\r\n`), each.bytes, Buffer.from('\r\n')];
        }),
      );
      pieces = cutInto(text, cuts);
      const results: MoveResult[] = [];
      const views: Buffer[] = [];
      await new Promise<void>((resolve) => {
        const connection = new PieceConnection(
          { host: '127.0.0.1', port },
          { connectTimeoutMs: 5000 },
          {
            ready: () => {
              if (views.length > 0) return;
              for (const each of answers) {
                const bytes =
                  each.kind === 'value' ? each.bytes.length : each.kind === 'length' ? each.bytes.length + 1 : 3;
                const view = Buffer.alloc(bytes, 0xee);
                views.push(view);
                const onDone = (result: MoveResult): void => {
                  results.push(result);
                  if (results.length === answers.length) setImmediate(() => connection.destroy('end'));
                };
                const kind = each.kind === 'set' ? 'set' : 'get';
                const deadlineMs = Number.POSITIVE_INFINITY;
                connection.send({ kind, key: 'k', view, start: 0, toEnd: true, deadlineMs, asking: false, onDone });
              }
            },
            end: () => resolve(),
          },
        );
      });
      expect(results).toEqual(
        answers.map(({ kind }) =>
          kind === 'error'
            ? { error: 'MOVED 1 a:2' }
            : kind === 'value' || kind === 'set'
              ? 'ok'
              : kind === 'empty'
                ? 'none'
                : kind,
        ),
      );
      for (const [i, each] of answers.entries()) {
        // Nothing but a whole value of the right length ever touches a view.
        expect(views[i]).toEqual(each.kind === 'value' ? each.bytes : Buffer.alloc(views[i]!.length, 0xee));
      }
    },
  );
  await fc.assert(property, { numRuns: 60 });
});

it('receives a value into its view itself; elsewhere goes what came in one read with its length', async () => {
  const value = Buffer.alloc(200_000, 'v');
  pieces = [Buffer.concat([Buffer.from(`$${value.length}\r\n`), value, Buffer.from('\r\n')])];
  const memory = new ArrayBuffer(value.length);
  const view = Buffer.from(memory);
  const receiving = watchReceiving();
  const results: MoveResult[] = [];
  try {
    await new Promise<void>((resolve) => {
      const connection = new PieceConnection(
        { host: '127.0.0.1', port },
        { connectTimeoutMs: 5000 },
        {
          ready: () => {
            if (results.length > 0 || connection.inFlight > 0) return;
            const onDone = (result: MoveResult): void => {
              results.push(result);
              setImmediate(() => connection.destroy('end'));
            };
            const job = { kind: 'get', key: 'k', view, start: 0, toEnd: true, asking: false } as const;
            connection.send({ ...job, deadlineMs: Number.POSITIVE_INFINITY, onDone });
          },
          end: () => resolve(),
        },
      );
    });
  } finally {
    receiving.end();
  }
  expect([results, view.equals(value)]).toEqual([['ok'], true]);
  const elsewhere = receiving.buffers.filter(({ buffer }) => buffer !== memory);
  expect(elsewhere.length).toBeLessThan(receiving.buffers.length);
  expect(elsewhere.filter(({ length }) => length > 64)).toEqual([]); // text before and behind it
});

it.each([
  ['something that is not RESP2', 'hello\r\n'],
  ['an answer that nobody asked for', '$-1\r\n+OK\r\n'],
  ['a value without its line end', '$3\r\nabcXY'],
])('%s ends the connection, and what waits is lost', async (_, text) => {
  pieces = [Buffer.from(text)];
  const results: MoveResult[] = [];
  await new Promise<void>((resolve) => {
    const connection = new PieceConnection(
      { host: '127.0.0.1', port },
      { connectTimeoutMs: 5000 },
      {
        ready: () => {
          if (results.length > 0 || connection.inFlight > 0) return;
          const onDone = (result: MoveResult): void => {
            results.push(result);
          };
          connection.send({
            kind: 'get',
            key: 'k',
            view: Buffer.alloc(3),
            start: 0,
            toEnd: true,
            deadlineMs: Number.POSITIVE_INFINITY,
            asking: false,
            onDone,
          });
        },
        end: () => resolve(),
      },
    );
  });
  expect(results).toEqual([text.startsWith('$-1') ? 'none' : 'lost']);
});

function cutInto(text: Buffer, cuts: readonly number[]): Buffer[] {
  const out: Buffer[] = [];
  for (let at = 0, i = 0; at < text.length; i++) {
    const bytes = cuts[i % cuts.length]!;
    out.push(text.subarray(at, at + bytes));
    at += bytes;
  }
  return out;
}

it.each([false, true])('a server that falls silent costs a job its deadline; behind ASKING: %s', async (asking) => {
  pieces = [];
  const failures: string[] = [];
  const pool = new PiecePool({
    connect: (on) => new PieceConnection({ host: '127.0.0.1', port }, { connectTimeoutMs: 5000 }, on),
    ...{ connections: 1, depth: 3, onFailure: (reason) => failures.push(reason) },
  });
  const job = { kind: 'get', key: 'k', view: Buffer.alloc(3), start: 0, toEnd: true, asking } as const;
  const deadlineMs = performance.now() + 300;
  const ended = new Promise<MoveResult>((onDone) => pool.submit({ ...job, deadlineMs, onDone }));
  const late = new Promise<string>((resolve) => setTimeout(resolve, 3_000, 'not ended'));
  expect(await Promise.race([ended, late])).toBe('lost');
  expect(failures).toEqual(['no answer within the time limit']);
  pool.close('end');
});

it.each(['', '1e2', '0x3', '-3', ' 3', '3.0', '99999999999999999999'])('%j is no length', async (length) => {
  pieces = [Buffer.from(`$${length}\r\nabc\r\n`)];
  const view = Buffer.alloc(3, 0xee);
  const results: MoveResult[] = [];
  const reason = await new Promise<string>((resolve) => {
    const connection = new PieceConnection(
      { host: '127.0.0.1', port },
      { connectTimeoutMs: 5000 },
      {
        ready: () => {
          if (results.length > 0 || connection.inFlight > 0) return;
          const onDone = (result: MoveResult): void => void results.push(result);
          const job = { kind: 'get', key: 'k', view, start: 0, toEnd: true, asking: false } as const;
          connection.send({ ...job, deadlineMs: Number.POSITIVE_INFINITY, onDone });
        },
        end: resolve,
      },
    );
  });
  expect([reason, results, view.toString('hex')]).toEqual([`not a length: $${length}`, ['lost'], 'eeeeee']);
});
