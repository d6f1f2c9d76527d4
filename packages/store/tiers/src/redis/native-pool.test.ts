/**
 * Lanes against a peer that speaks Redis's protocol, and cuts its answers anywhere: whole values arrive whole, and verified; anything
 * else never counts as a value, and what is no answer ends the connection, and nothing but what it carried.
 */
import { createServer, type Server, type Socket } from 'node:net';
import { native } from '@kvtier/data-plane';
import { headerBytes } from '@kvtier/identity';
import fc from 'fast-check';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { TestBench } from '../kit/testing/objects.ts';
import { NativePool, type ValueEnd, type ValueJob, ValueMover } from './native-pool.ts';

const arenaBytes = 16 << 20;
let bench: TestBench;
let mover: ValueMover;
let server: Server;
let port: number;
/** What the peer holds. */
let values: Map<string, Buffer>;
/** Lengths of the pieces that its answers are sent in, over and over. */
let cuts: readonly number[];
/** Said instead of an answer. */
let nonsense: string | undefined;
/** Values by their ids that it has no answer but an error for, and that it never answers at all. */
let refused: Set<string>;
let silent: Set<string>;
/** Values by their ids, in the order asked for, and by which connection. */
let asked: { id: string; socket: Socket; bytes: number }[];
/** What the others at that server have sent so far. */
let foreignCalls: number;
/** While others do, each look at their count finds many more. */
let othersSend: boolean;
const countForeignCalls = async (): Promise<number> => (foreignCalls += othersSend ? 1_000 : 0);

beforeEach(async () => {
  bench = new TestBench(arenaBytes);
  mover = new ValueMover(bench.arena);
  [values, cuts, nonsense, refused, silent, asked] = [new Map(), [1 << 20], undefined, new Set(), new Set(), []];
  foreignCalls = 0;
  othersSend = false;
  server = createServer(serve);
  await new Promise<void>((resolve) => server.listen(0, '127.0.0.1', resolve));
  port = (server.address() as { port: number }).port;
});
afterEach(async () => {
  mover.close();
  bench.dispose();
  await new Promise((resolve) => server.close(resolve));
});

/** GETRANGE and SET ... XX, as Redis does them. */
function serve(socket: Socket): void {
  let text: Buffer = Buffer.alloc(0);
  socket.setNoDelay(true).on('error', () => {});
  const out: Buffer[] = [];
  const flow = (): void => {
    const next = out.shift();
    if (next !== undefined) socket.write(next, () => setImmediate(flow));
  };
  const say = (answer: Buffer): void => {
    const isIdle = out.length === 0;
    for (let at = 0, i = 0; at < answer.length; at += cuts[i++ % cuts.length]!) {
      out.push(answer.subarray(at, at + cuts[i % cuts.length]!));
    }
    if (isIdle) flow();
  };
  socket.on('data', (data) => {
    text = Buffer.concat([text, data]);
    for (let words = commandIn(text); words !== undefined; words = commandIn(text)) {
      text = text.subarray(words.bytes);
      const [name, key, first, last] = words.words.map((word) => word.toString('latin1'));
      const held = values.get(key!);
      const id = key!.split(':')[1]!;
      const end = last === '-1' ? undefined : Number(last) + 1;
      asked.push({ id, socket, bytes: (end ?? held?.length ?? 0) - Number(first) });
      if (silent.has(id)) continue;
      if (nonsense !== undefined) say(Buffer.from(nonsense));
      else if (refused.has(id)) say(Buffer.from(`-ERR not ${id}\r\n`));
      else if (name === 'SET') {
        if (held !== undefined) values.set(key!, words.words[2]!);
        say(Buffer.from(held === undefined ? '$-1\r\n' : '+OK\r\n'));
      } else {
        const piece = held?.subarray(Number(first), end) ?? Buffer.alloc(0);
        say(Buffer.concat([Buffer.from(`$${piece.length}\r\n`), piece, Buffer.from('\r\n')]));
      }
    }
  });
}

function commandIn(text: Buffer): { words: Buffer[]; bytes: number } | undefined {
  let at = 0;
  const line = (): string | undefined => {
    const end = text.indexOf('\r\n', at);
    if (end === -1) return undefined;
    const found = text.toString('latin1', at + 1, end);
    at = end + 2;
    return found;
  };
  const words: Buffer[] = [];
  const count = Number(line() ?? 0);
  for (let i = 0; i < count; i++) {
    const bytes = Number(line() ?? Number.NaN);
    if (!(at + bytes + 2 <= text.length)) return undefined;
    words.push(text.subarray(at, at + bytes));
    at += bytes + 2;
  }
  return count > 0 ? { words, bytes: at } : undefined;
}

interface Move {
  readonly kind: 'get' | 'set';
  readonly id: string;
  readonly slot: number;
  readonly bytes: number;
  readonly partBytes: number;
  readonly identity: Uint8Array | null;
}

interface Asked {
  readonly depth?: number;
  readonly connections?: number;
  readonly limitMs?: number;
}

/** Lanes to the peer, and why any of them ended. */
function poolTo({ depth = 2, connections = 1 }: Asked = {}): { natives: NativePool; failures: string[] } {
  const failures: string[] = [];
  const address = { host: '127.0.0.1', port };
  const onFailure = (reason: string): void => {
    failures.push(reason);
  };
  const login = { connectTimeoutMs: 10_000 };
  const options = { address, login, connections, depth, onFailure, foreignCalls: countForeignCalls };
  return { natives: new NativePool(mover, options), failures };
}

const ended = (natives: NativePool, group: readonly Move[], limitMs = 60_000): Promise<readonly ValueEnd[]> =>
  new Promise((resolve) => {
    const onDone = (ends: 'lost' | readonly ValueEnd[]): void => {
      resolve(ends === 'lost' ? group.map(() => 'lost') : ends);
    };
    natives.submit({ ...jobOf(group), deadlineMs: performance.now() + limitMs, onDone });
  });

/** What goes one way `together` at a time; what each ended with. */
async function moveAll(moves: readonly Move[], asked: Asked = {}, together = 1) {
  const groups: Move[][] = [];
  for (const move of moves) {
    const last = groups.at(-1);
    if (last !== undefined && last.length < together && last[0]!.kind === move.kind) last.push(move);
    else groups.push([move]);
  }
  const { natives, failures } = poolTo(asked);
  const results = (await Promise.all(groups.map((group) => ended(natives, group, asked.limitMs)))).flat();
  natives.close('the end');
  return { results, failures };
}

function jobOf(group: readonly Move[]): Omit<ValueJob, 'onDone' | 'deadlineMs'> {
  const { kind } = group[0]!;
  const rows = Float64Array.from(group.flatMap(({ slot, bytes, partBytes }) => [slot, bytes, partBytes]));
  const identities = kind === 'get' ? Buffer.concat(group.map(({ identity }) => identity!)) : null;
  return { kind, base: 'v:', ids: group.map(({ id }) => id).join(' '), rows, identities };
}

const split = (object: Buffer, partBytes: number): Buffer[] =>
  Array.from({ length: Math.ceil(object.length / partBytes) }, (_, i) =>
    Buffer.from(object.subarray(i * partBytes, (i + 1) * partBytes)),
  );

const kinds = [
  'sound',
  'sound',
  'written',
  'unreserved',
  'gone',
  'short',
  'long',
  'flipped',
  'foreign',
  'refused',
] as const;

it('values arrive whole and verified or not at all, however the answers are cut', async () => {
  const value = fc.record({
    kind: fc.constantFrom(...kinds),
    payloadBytes: fc.oneof(fc.integer({ min: 1, max: 5000 }), fc.integer({ min: 1, max: 200_000 })),
    partBytes: fc.constantFrom(4096, 40_000, 150_000, 500_000),
  });
  const property = fc.asyncProperty(
    fc.array(value, { minLength: 1, maxLength: 6 }),
    fc.array(fc.oneof(fc.integer({ min: 1, max: 90 }), fc.integer({ min: 1, max: 100_000 })), { maxLength: 5 }),
    fc.integer({ min: 1, max: 4 }),
    fc.integer({ min: 1, max: 4 }),
    fc.integer({ min: 1, max: 3 }),
    async (rows, lengths, depth, together, connections) => {
      values.clear();
      refused.clear();
      cuts = [...lengths, 50_000];
      const made = rows.map(({ kind, payloadBytes, partBytes }, i) => {
        const { slot: source, identity } = bench.filledObject(`${i}`, payloadBytes);
        const bytes = headerBytes + payloadBytes;
        const object = native.arenaRead(bench.arena, source, bytes);
        const parts = split(object, partBytes);
        const part = parts[i % parts.length]!;
        if (kind === 'flipped') part[part.length >> 1]! ^= 4;
        if (kind === 'short') parts[i % parts.length] = part.subarray(1);
        if (kind === 'long') parts[i % parts.length] = Buffer.concat([part, Buffer.from('!')]);
        for (const [number, content] of parts.entries()) {
          const isThere = kind !== 'unreserved' && !(kind === 'gone' && number === i % parts.length);
          if (isThere) values.set(`v:${i}:${number}`, kind === 'written' ? Buffer.alloc(0) : content);
        }
        if (kind === 'refused') refused.add(String(i));
        const isSet = kind === 'written' || kind === 'unreserved';
        const slot = isSet ? source : bench.emptySlot(payloadBytes);
        const wanted = kind === 'foreign' ? Buffer.alloc(64, 1) : identity;
        const job = { id: String(i), slot, bytes, partBytes, identity: isSet ? null : wanted };
        return { kind, object, slots: new Set([source, slot]), job: { ...job, kind: isSet ? 'set' : 'get' } as const };
      });
      const { results, failures } = await moveAll(
        made.map(({ job }) => job),
        { depth, connections },
        together,
      );
      expect(failures).toEqual([]);
      for (const [i, { kind, object, slots, job }] of made.entries()) {
        const content = native.arenaRead(bench.arena, job.slot, job.bytes);
        if (kind === 'sound' || kind === 'written') expect(results[i]).toBe('ok');
        else if (kind === 'unreserved' || kind === 'gone') expect(results[i]).toBe('none');
        else if (kind === 'refused') expect(results[i]).toEqual({ error: `ERR not ${i}` });
        else if (kind === 'flipped' || kind === 'foreign') expect(results[i]).toBe('fault');
        else expect(results[i]).toBe(kind === 'short' && object.length % job.partBytes === 1 ? results[i] : 'length');
        if (results[i] === 'ok') expect(content.equals(object)).toBe(true);
        if (kind === 'written') {
          const stored = split(object, job.partBytes).map((_, number) => values.get(`v:${i}:${number}`)!);
          expect(Buffer.concat(stored).equals(object)).toBe(true);
        }
        for (const slot of slots) bench.tier.free(slot);
      }
    },
  );
  await fc.assert(property, { numRuns: 30 });
});

it.each([
  ['something that is not RESP2', 'hello\r\n'],
  ['another length than it says', '$3\r\nabcXY'],
  ['no length', '$x\r\n'],
  ['an answer that nobody asked for', '$-1\r\n$-1\r\n$-1\r\n'],
])('a peer that says %s loses the connection, and what waits is lost', async (_, text) => {
  nonsense = text;
  const { slot, identity } = bench.filledObject('one', 1000);
  const job = { kind: 'get', slot, bytes: 1256, partBytes: 4096, identity } as const;
  const { results, failures } = await moveAll([0, 1].map((i) => ({ ...job, id: String(i) })));
  expect(results.filter((result) => result === 'lost' || result === 'none')).toEqual(results);
  expect(results).toHaveLength(2);
  if (!text.startsWith('$-1')) expect(failures[0]).toMatch(/not RESP2|not a length/);
});

it('a refusal is the server’s own line, and does not end the connection', async () => {
  nonsense = '-MOVED 7 a:1\r\n';
  const { slot, identity } = bench.filledObject('one', 1000);
  const job = { slot, bytes: 1256, partBytes: 100, id: '1' } as const;
  const { results, failures } = await moveAll([
    { ...job, kind: 'get', identity },
    { ...job, kind: 'set', identity: null },
  ]);
  expect(results).toEqual([{ error: 'MOVED 7 a:1' }, { error: 'MOVED 7 a:1' }]);
  expect(failures).toEqual([]);
});

/** Sound values of one part that the peer has, to be read. */
function soundOnes(ids: readonly string[]): (Move & { readonly object: Buffer })[] {
  return ids.map((id) => {
    const { slot: source, identity } = bench.filledObject(id, 3000);
    const bytes = headerBytes + 3000;
    const object = native.arenaRead(bench.arena, source, bytes);
    values.set(`v:${id}:0`, object);
    return { kind: 'get', id, slot: bench.emptySlot(3000), bytes, partBytes: 1 << 20, identity, object };
  });
}

it('a connection that falls silent is closed at the deadline, and loses only what it carried; others take the rest', async () => {
  silent.add('b');
  const moves = soundOnes(['a', 'b', 'c', 'd', 'e', 'f', 'g', 'h']);
  const { results, failures } = await moveAll(moves, { depth: 1, connections: 2, limitMs: 500 }, 8);
  expect(results).toEqual(moves.map(({ id }) => (id === 'b' ? 'lost' : 'ok')));
  expect(failures).toEqual(['no answer within the time limit']);
  for (const { id, slot, bytes, object } of moves) {
    if (id !== 'b') expect(native.arenaRead(bench.arena, slot, bytes).equals(object)).toBe(true);
  }
});

it('one connection reads at a time; when it falls silent, another one does', async () => {
  let connections = 0;
  server.on('connection', () => connections++);
  const [first, ...others] = soundOnes(['first', 'a', 'b', 'c', 'd', 'e', 'f', 'g']);
  silent.add('first').add('a');
  const { natives } = poolTo({ depth: 2, connections: 3 });
  const silentRead = ended(natives, [first!]);
  await expect.poll(() => connections).toBe(3);
  const reads = others.map((move) => ended(natives, [move]));
  // 'a' was asked for where no answers come any more.
  expect((await Promise.all(reads.slice(1))).flat()).toEqual(others.slice(1).map(() => 'ok'));
  const readers = others.map((move) => asked.find(({ id }) => id === move.id)!.socket);
  expect(readers[0]).toBe(asked[0]!.socket);
  expect(readers[1]).not.toBe(readers[0]);
  expect(new Set(readers.slice(1)).size).toBe(1);
  natives.close('the end');
  expect([await silentRead, await reads[0]]).toEqual([['lost'], ['lost']]);
});

it('large values go out by reference, and are as whole as small ones', async () => {
  const moves = [600_000, 131_072, 131_071, 400_000].map((bytes, i): Move => {
    values.set(`v:${i}:0`, Buffer.alloc(0));
    return {
      kind: 'set',
      id: String(i),
      slot: bench.filledObject(`${i}`, bytes).slot,
      bytes,
      partBytes: 1 << 20,
      identity: null,
    };
  });
  const { results } = await moveAll(moves, { depth: 3 }, 4);
  expect(results).toEqual(moves.map(() => 'ok'));
  for (const { id, slot, bytes } of moves) {
    expect(values.get(`v:${id}:0`)!.equals(native.arenaRead(bench.arena, slot, bytes))).toBe(true);
  }
});

it('what waits for its turn is lost at its deadline, and never asked for', async () => {
  silent.add('a');
  const [first, second] = soundOnes(['a', 'b']);
  const { natives } = poolTo({ depth: 1 });
  const both = [ended(natives, [first!], 60_000), ended(natives, [second!], 60_000)];
  await expect.poll(() => asked.map(({ id }) => id)).toEqual(['a']);
  natives.close('the end');
  expect(await Promise.all(both)).toEqual([['lost'], ['lost']]);
  const { results } = await moveAll([first!, second!], { depth: 1, limitMs: 300 }, 2);
  expect(results).toEqual(['lost', 'lost']);
  expect(asked.map(({ id }) => id)).toEqual(['a', 'a']);
});

it('a connection that the peer ends loses what it carried, and another is made for the rest', async () => {
  silent.add('b');
  const moves = soundOnes(['a', 'b', 'c', 'd']);
  const { natives, failures } = poolTo({ depth: 1 });
  const all = ended(natives, moves);
  await expect.poll(() => asked.map(({ id }) => id)).toEqual(['a', 'b']);
  asked.at(-1)!.socket.destroy();
  expect(await all).toEqual(['ok', 'lost', 'ok', 'ok']);
  expect(failures).toHaveLength(1);
  natives.close('the end');
});

it('what is read goes before what waits to be written', async () => {
  silent.add('first');
  const [first, read] = soundOnes(['first', 'read']);
  const written = ['w1', 'w2'].map((id): Move => {
    values.set(`v:${id}:0`, Buffer.alloc(0));
    const { slot } = bench.filledObject(id, 3000);
    return { kind: 'set', id, slot, bytes: headerBytes + 3000, partBytes: 1 << 20, identity: null };
  });
  const { natives } = poolTo({ depth: 1 });
  const ends = Promise.all([ended(natives, [first!]), ended(natives, written), ended(natives, [read!])]);
  await expect.poll(() => asked.map(({ id }) => id)).toEqual(['first']);
  asked[0]!.socket.destroy();
  expect(await ends).toEqual([['lost'], ['ok', 'ok'], ['ok']]);
  expect(asked.map(({ id }) => id)).toEqual(['first', 'read', 'w1', 'w2']);
  natives.close('the end');
});

it('nobody there, or a name that is none: why, and everything is lost', async () => {
  const [one] = soundOnes(['one']);
  const closed = port;
  await new Promise((resolve) => server.close(resolve));
  const end = async (host: string): Promise<string> => {
    const failures: string[] = [];
    const onFailure = (reason: string): void => {
      failures.push(reason);
    };
    const login = { connectTimeoutMs: 20_000 };
    const options = {
      address: { host, port: closed },
      login,
      connections: 2,
      depth: 2,
      onFailure,
      foreignCalls: async () => 0,
    };
    const natives = new NativePool(mover, options);
    expect(await ended(natives, [one!])).toEqual(['lost']);
    natives.close('the end');
    expect(failures).toHaveLength(1);
    return failures[0]!;
  };
  expect(await end('127.0.0.1')).toMatch(/connect: Connection refused/);
  expect(await end('no-such-host.invalid')).toMatch(/ENOTFOUND|EAI_AGAIN|has no address/);
});

it('pieces are large while nobody else uses the server, and small while somebody does or nothing is known', async () => {
  const [bytes, partBytes] = [headerBytes + 1_500_000, 1 << 20];
  const { slot: source, identity } = bench.filledObject('one', bytes - headerBytes);
  const object = native.arenaRead(bench.arena, source, bytes);
  for (const [number, part] of split(object, partBytes).entries()) values.set(`v:one:${number}`, part);
  const slot = bench.emptySlot(bytes - headerBytes);
  const { natives } = poolTo();
  /** Sizes of the pieces that it is read in. */
  const read = async (): Promise<number[]> => {
    asked.length = 0;
    const move: Move = { kind: 'get', id: 'one', slot, bytes, partBytes, identity };
    expect(await ended(natives, [move])).toEqual(['ok']);
    return asked.map((piece) => piece.bytes);
  };
  othersSend = true;
  expect(await read()).toEqual([...new Array<number>(8).fill(128 << 10), 150_560, 150_560, 150_560]);
  const large = [partBytes, bytes - partBytes];
  othersSend = false;
  await expect.poll(read).toEqual(large);
  othersSend = true;
  await expect.poll(async () => Math.max(...(await read()))).toBeLessThanOrEqual(512 << 10);
  othersSend = false;
  await expect.poll(read).toEqual(large);
  expect(native.arenaRead(bench.arena, slot, bytes).equals(object)).toBe(true);
  natives.close('the end');
});
