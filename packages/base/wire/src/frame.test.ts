import { Buffer } from 'node:buffer';
import { mkdtempSync, rmSync } from 'node:fs';
import net from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { FrameReader, writeFrame } from './frame.ts';

function framed(messages: Uint8Array[]): Buffer {
  return Buffer.concat(
    messages.flatMap((message) => {
      const length = Buffer.alloc(4);
      length.writeUInt32LE(message.length);
      return [length, message];
    }),
  );
}

it('any cut of the stream into chunks, and any number of frames at a time, gives the same messages', () => {
  const message = fc.uint8Array({ minLength: 1, maxLength: 700 });
  fc.assert(
    fc.property(
      fc.array(message, { maxLength: 8 }),
      fc.array(fc.integer({ min: 1, max: 90 }), { minLength: 1 }),
      fc.integer({ min: 1, max: 9 }),
      (sent, cuts, framesAtATime) => {
        const stream = framed(sent);
        const got: Buffer[] = [];
        const reader = new FrameReader((bytes) => got.push(Buffer.from(bytes)));
        for (let at = 0, cut = 0; at < stream.length; cut++) {
          const end = at + cuts[cut % cuts.length]!;
          for (let rest = stream.subarray(at, end); rest.length > 0; ) {
            const before = got.length;
            rest = reader.push(rest, () => got.length < before + framesAtATime);
            expect(got.length).toBeLessThanOrEqual(before + framesAtATime);
          }
          at = end;
        }
        expect(got).toEqual(sent.map((bytes) => Buffer.from(bytes)));
        expect(reader.pendingBytes).toBe(0);
      },
    ),
  );
});

it('a length of zero or beyond the limit is PROTOCOL, in one chunk or byte by byte, before any memory is taken', () => {
  for (const announced of [0, 101, 0xffff_ffff]) {
    const header = Buffer.alloc(4);
    header.writeUInt32LE(announced);
    expect(() => new FrameReader(() => {}, 100).push(header)).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
    const slow = new FrameReader(() => {}, 100);
    for (const byte of header.subarray(0, 3)) slow.push(Buffer.of(byte));
    expect(() => slow.push(header.subarray(3))).toThrow(expect.objectContaining({ code: 'PROTOCOL' }));
  }
});

it('a peer that does not read is disconnected when its answers pass the bound; one that reads gets all', async () => {
  const folder = mkdtempSync(path.join(tmpdir(), 'kvtier-frame-'));
  const address = path.join(folder, 's');
  const accepted: net.Socket[] = [];
  const server = net.createServer((socket) => accepted.push(socket)).listen(address);
  try {
    const connect = async (): Promise<[net.Socket, net.Socket]> => {
      const client = net.connect(address);
      client.on('error', () => {});
      await new Promise((resolve) => server.once('connection', resolve));
      return [client, accepted.at(-1)!];
    };
    const message = Buffer.alloc(64 << 10, 7);
    const [deaf, toDeaf] = await connect();
    deaf.pause();
    const failure = new Promise((resolve) => toDeaf.once('error', resolve));
    let written = 0;
    while (written < 10_000 && writeFrame(toDeaf, message, 1 << 20)) written++;
    expect(await failure).toMatchObject({ code: 'DISCONNECTED' });
    expect(written).toBeGreaterThan(0);
    expect(written).toBeLessThan(200);
    expect(writeFrame(toDeaf, message)).toBe(false);

    const [reading, toReading] = await connect();
    let count = 0;
    const reader = new FrameReader((bytes) => {
      expect(bytes.equals(message)).toBe(true);
      count++;
    });
    const ended = new Promise((resolve) => reading.on('data', (chunk) => reader.push(chunk)).once('end', resolve));
    for (let sent = 0; sent < 64; sent++) expect(writeFrame(toReading, message)).toBe(true);
    toReading.end();
    await ended;
    expect(count).toBe(64);
    deaf.destroy();
  } finally {
    for (const socket of accepted) socket.destroy();
    await new Promise((resolve) => server.close(resolve));
    rmSync(folder, { recursive: true });
  }
});
