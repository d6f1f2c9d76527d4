import { readFileSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { ClientFrame } from '@kvtier/wire';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { checkShape } from './frame-shape.ts';
import { attachOf } from './testing/raw-client.ts';

const most = 65_536;
const varint = (value: number): number[] =>
  value < 0x80 ? [value] : [(value % 0x80) | 0x80, ...varint(Math.floor(value / 0x80))];
const field = (number: number, bytes: Uint8Array): Buffer =>
  Buffer.concat([Buffer.from([...varint(number * 8 + 2), ...varint(bytes.length)]), bytes]);
const passes = (frame: Uint8Array): void => checkShape(frame, most);
const refused = (frame: Uint8Array, why: RegExp): void => {
  const startMs = native.threadCpuMs();
  expect(() => passes(frame)).toThrow(
    expect.objectContaining({ code: 'PROTOCOL', message: expect.stringMatching(why) }),
  );
  // Decoding these took from 1 to 9 seconds.
  expect(native.threadCpuMs() - startMs).toBeLessThan(500);
};
const large = 16_000_000;

describe('more than a request may have is refused before it is decoded', () => {
  it.each([
    ['offsets of a commit', field(6, field(1, Buffer.alloc(large, 1)))],
    ['offsets of a commit, in pieces', field(6, Buffer.concat(Array(2000).fill(field(1, Buffer.alloc(100, 1)))))],
    ['checksums', field(6, field(2, Buffer.alloc(large)))],
    ['offsets of an abort', field(7, field(1, Buffer.alloc(large, 1)))],
    ['offsets that are not packed', field(7, Buffer.alloc(large, Buffer.from([8, 1])))],
    ['wrong blocks', field(8, field(2, Buffer.alloc(large, 0)))],
    ['numbers of ten bytes', field(8, field(2, Buffer.alloc(large, 0x80)))],
  ])('%s', (_, frame) => refused(frame, /more than 65536 numbers in a list/));

  it.each([
    [
      'many requests in one frame',
      Buffer.concat([field(11, Buffer.alloc(0)), field(11, Buffer.alloc(0))]),
      /second request/,
    ],
    ['unknown fields', Buffer.alloc(large, Buffer.from([0x78, 1])), /more than 64 fields/],
    ['unknown fields in a request', field(8, Buffer.alloc(large, Buffer.from([0x78, 1]))), /more than 64 fields/],
    ['a long name', field(2, field(6, Buffer.alloc(large, 0x61))), /4096 at most/],
    ['groups', Buffer.alloc(large, 0x0b), /a field of kind 3/],
    ['a number without an end', Buffer.alloc(large, 0x80), /beyond 32 bits/],
    ['a value without an end', Buffer.concat([Buffer.from([8]), Buffer.alloc(100, 0x80)]), /more than 10 bytes/],
    ['half a field', Buffer.from([0x12, 5, 1]), /beyond its end/],
  ])('%s', (_, frame, why) => refused(frame, why));
});

it('every request of session.proto has its bounds', () => {
  const proto = readFileSync(new URL('../../../../proto/kvtier/v1/session.proto', import.meta.url), 'utf8');
  const requests = [
    .../message ClientFrame \{[\s\S]*?oneof body \{([\s\S]*?)\}/.exec(proto)![1]!.matchAll(/(\w+) = (\d+);/g),
  ];
  expect(requests.length).toBeGreaterThan(10);
  for (const [, name, number] of requests) {
    const bare = field(Number(number), Buffer.alloc(0));
    const camel = name!.replace(/_(\w)/g, (_, letter: string) => letter.toUpperCase());
    // A request without bounds passes twice: it is not known.
    refused(Buffer.concat([bare, bare]), new RegExp(`second request in the frame of "${camel}"`));
  }
});

it('what clients send passes, up to the most that they may', () => {
  const offsets = Array.from({ length: most }, (_, i) => BigInt(i) << 40n);
  const bodies: NonNullable<ClientFrame['body']>[] = [
    { $case: 'attach', value: attachOf({ client: 'x'.repeat(500), tenant: 'y'.repeat(200), ttlSeconds: 2 ** 32 - 1 }) },
    { $case: 'lookup', value: { hashes: Buffer.alloc(most * 32) } },
    { $case: 'reserve', value: { parent: Buffer.alloc(32), hashes: Buffer.alloc(most * 32) } },
    { $case: 'load', value: { hashes: Buffer.alloc(most * 32), deadlineMs: 1, awaitMs: 2 ** 32 - 1 } },
    { $case: 'endLoad', value: { loadId: (1n << 64n) - 1n } },
    { $case: 'commit', value: { offsets, checksums: offsets } },
    { $case: 'abort', value: { offsets: offsets.map((offset) => offset | (1n << 63n)) } },
    { $case: 'release', value: { loadId: 1n << 63n, corrupt: offsets.map((_, i) => i) } },
    { $case: 'pin', value: { hashes: Buffer.alloc(most * 32), ttlMs: 1, ticket: Buffer.alloc(16) } },
    { $case: 'endPin', value: { ticket: Buffer.alloc(16), hash: Buffer.alloc(32) } },
    { $case: 'unpin', value: { hashes: Buffer.alloc(0) } },
    { $case: 'prefetch', value: { hashes: Buffer.alloc(32) } },
    { $case: 'cancelPrefetch', value: { prefetchId: 7n } },
    { $case: 'stats', value: {} },
  ];
  for (const body of bodies) passes(ClientFrame.encode({ id: (1n << 64n) - 1n, body }).finish());
});

it('whatever the bytes are, what passes decodes within the bounds, or not at all', () => {
  const few = 8;
  const body = fc.integer({ min: 1, max: 16 });
  const inner = fc.array(
    fc.tuple(fc.integer({ min: 1, max: 4 }), fc.uint8Array({ maxLength: 40 })).map(([n, bytes]) => field(n, bytes)),
    { maxLength: 4 },
  );
  const frame = fc.oneof(
    fc.uint8Array({ maxLength: 60 }),
    fc.tuple(body, inner).map(([number, fields]) => field(number, Buffer.concat(fields))),
  );
  fc.assert(
    fc.property(frame, (bytes) => {
      let decoded: ClientFrame;
      try {
        checkShape(bytes, few);
        decoded = ClientFrame.decode(bytes);
      } catch {
        return;
      }
      for (const value of Object.values(decoded.body?.value ?? {})) {
        if (Array.isArray(value)) expect(value.length).toBeLessThanOrEqual(few);
      }
    }),
    { numRuns: 500 },
  );
});
