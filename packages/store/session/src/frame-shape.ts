/**
 * The shape of a client's frame, looked at before anything is made of it: how many bodies, fields and numbers there are. Decoding
 * 16 MiB of one-byte numbers would take the event loop from all engines for seconds, and a gigabyte of memory.
 *
 * Invariants: what passes decodes into at most `maxNumbers` numbers a field, `maxFields` fields and one body; it is read once,
 * up to the first thing that is too much; bytes that are no protobuf are refused here.
 */
import { KvError } from '@kvtier/errors';

/** Fields that are not lists; ours have at most nine. A later client may send some that we do not know. */
const maxFields = 64;
/** Bytes of a body that carries no list and no hashes. */
const plainBytes = 4096;
/** The longest form of a number. */
const varintBytes = 10;

type List = 'varint' | 'fixed64';
interface Body {
  readonly name: string;
  /** By field number. */
  readonly lists?: Readonly<Record<number, List>>;
  /** Hashes come as bytes, bounded by the frame, and are counted by hashes.ts. */
  readonly hasHashes?: boolean;
}

/** `ClientFrame` of session.proto, by field number; 1 is the id. */
const bodies: Readonly<Record<number, Body>> = {
  2: { name: 'attach' },
  3: { name: 'lookup', hasHashes: true },
  4: { name: 'load', hasHashes: true },
  5: { name: 'reserve', hasHashes: true },
  6: { name: 'commit', lists: { 1: 'varint', 2: 'fixed64' } },
  7: { name: 'abort', lists: { 1: 'varint' } },
  8: { name: 'release', lists: { 2: 'varint' } },
  9: { name: 'pin', hasHashes: true },
  10: { name: 'unpin', hasHashes: true },
  11: { name: 'stats' },
  12: { name: 'prefetch', hasHashes: true },
  13: { name: 'cancelPrefetch' },
  14: { name: 'endLoad' },
  15: { name: 'hold' },
  16: { name: 'endPin' },
};

/** KvError PROTOCOL for a frame that is none, or has more in it than a request may have. */
export function checkShape(frame: Uint8Array, maxNumbers: number): void {
  let count = 0;
  let found: Body | undefined;
  for (const field of fieldsOf(frame, 0, frame.length)) {
    if (++count > maxFields) refuse('a frame', `more than ${maxFields} fields`);
    const body = bodies[field.number];
    if (body === undefined || field.wire !== wire.bytes) continue;
    if (found !== undefined) refuse(body.name, `a second request in the frame of "${found.name}"`);
    found = body;
    checkBody(frame, body, field, maxNumbers);
  }
}

function checkBody(frame: Uint8Array, body: Body, { from, to }: Field, maxNumbers: number): void {
  const { name, lists = {}, hasHashes } = body;
  if (to - from > plainBytes && !hasHashes && body.lists === undefined)
    refuse(name, `${to - from} bytes, ${plainBytes} at most`);
  let count = 0;
  const numbers: Record<number, number> = {};
  for (const field of fieldsOf(frame, from, to)) {
    const list = lists[field.number];
    if (list === undefined) {
      if (++count > maxFields) refuse(name, `more than ${maxFields} fields`);
      continue;
    }
    const sum = (numbers[field.number] ?? 0) + numbersIn(frame, field, list, maxNumbers);
    if (sum > maxNumbers) refuse(name, `more than ${maxNumbers} numbers in a list`);
    numbers[field.number] = sum;
  }
}

/** How many numbers the field has: one, or as many as are packed in it. More than `most` are not counted. */
function numbersIn(frame: Uint8Array, { wire: kind, from, to }: Field, list: List, most: number): number {
  if (kind !== wire.bytes) return 1;
  if (list === 'fixed64') return Math.ceil((to - from) / 8);
  if (to - from > most * varintBytes) return most + 1;
  let count = 0;
  for (let at = from; at < to; at++) if (frame[at]! < 0x80) count++;
  return count;
}

const wire = { varint: 0, fixed64: 1, bytes: 2, fixed32: 5 } as const;

interface Field {
  number: number;
  wire: number;
  /** Of its value; without the length of bytes. */
  from: number;
  to: number;
}

/** The same object for each of them. */
function* fieldsOf(bytes: Uint8Array, start: number, end: number): Generator<Field> {
  const field: Field = { number: 0, wire: 0, from: 0, to: 0 };
  let at = start;
  /** A number of up to 32 bits; `at` stands behind it. */
  const short = (): number => {
    let value = 0;
    for (let shift = 0; shift < 35; shift += 7) {
      const byte = at < end ? bytes[at++]! : refuse('a frame', 'an end within a number');
      value += (byte & 0x7f) * 2 ** shift;
      if (byte < 0x80) return value;
    }
    return refuse('a frame', 'a length or a field number beyond 32 bits');
  };
  while (at < end) {
    const tag = short();
    field.number = Math.floor(tag / 8);
    field.wire = tag % 8;
    const length = field.wire === wire.bytes ? short() : 0;
    field.from = at;
    if (field.wire === wire.varint) {
      while (at < end && bytes[at]! >= 0x80 && at - field.from < varintBytes) at++;
      at++;
      if (at - field.from > varintBytes) refuse('a frame', `a number of more than ${varintBytes} bytes`);
    } else if (field.wire === wire.fixed64) at += 8;
    else if (field.wire === wire.fixed32) at += 4;
    else if (field.wire === wire.bytes) at += length;
    else refuse('a frame', `a field of kind ${field.wire}, which this protocol does not have`);
    if (at > end) refuse('a frame', 'a field beyond its end');
    field.to = at;
    yield field;
  }
}

function refuse(what: string, why: string): never {
  throw new KvError('PROTOCOL', `session link: ${what}: ${why}; send what session.proto has, less at once`);
}
