/** A node of another version, by bytes: an older one, and a newer one that says what this engine does not know. */
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { ClientFrame, FrameReader } from '@kvtier/wire';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { SessionLink } from './session-link.ts';
import { realTimers } from './timers.ts';

let folder: string;
const ends: (() => unknown)[] = [];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-mixed-'));
});
afterEach(() => {
  for (const end of ends.splice(0).reverse()) end();
  rmSync(folder, { recursive: true });
});

const frame = (hex: string): Buffer => {
  const message = Buffer.from(hex.replaceAll(' ', ''), 'hex');
  const length = Buffer.alloc(4);
  length.writeUInt32LE(message.length);
  return Buffer.concat([length, message]);
};
/** Field 2, the boot epoch. */
const epoch = '11 0807060504030201';
/** Attached of the first version: session "s", arena_path "/a", arena_bytes 4096, header_bytes 256, arena_id 9. */
const attached = '1a 16 0a0173 12022f61 188020 208002 290900000000000000';
/** Field 60 of the frame, which nobody knows; within a known answer field 61. */
const unknownBody = 'e203 02 6869';
const unknownField = 'ea03 02 6869';

async function connect(answer: (socket: Socket, request: ClientFrame) => void) {
  const path = join(folder, 's');
  const server = createServer((socket) => {
    const reader = new FrameReader((message) => answer(socket, ClientFrame.decode(message)));
    socket.on('data', (bytes) => reader.push(bytes));
    ends.push(() => socket.destroy());
  });
  server.listen(path);
  await once(server, 'listening');
  ends.push(() => server.close());
  let unknown = 0;
  const link = await SessionLink.connect(
    path,
    null,
    realTimers,
    () => {},
    () => unknown++,
  );
  ends.push(() => link.end(new KvError('CANCELLED', 'the test is over')));
  return { link, unknown: () => unknown };
}

const attach = {
  $case: 'attach',
  value: {
    ...{
      protocol: 1,
      namespace: Buffer.alloc(32, 7),
      payloadBytes: 1n,
      blockTokens: 16,
      hashBytes: 16,
      client: 'test',
    },
    ...{ previousSession: Buffer.alloc(0), tenant: '', ttlSeconds: 0 },
  },
} as const;

it('an older node offers less, and that is all', async () => {
  const { link } = await connect((socket) => socket.write(frame(`0801 ${epoch} ${attached}`)));
  const { session, arenaPath, hasLockFile, heldTag, endsPins, wantsTokenIds } = await link.call(
    attach,
    'attached',
    5_000,
  );
  expect([session.toString(), arenaPath]).toEqual(['s', '/a']);
  expect([hasLockFile, heldTag, endsPins, wantsTokenIds].map((offer) => offer ?? false)).toEqual(Array(4).fill(false));
});

it('what only a newer node knows is skipped and counted; fields of its answers, too', async () => {
  const { link, unknown } = await connect((socket, { id }) => {
    const number = id.toString(16).padStart(2, '0');
    socket.write(frame(`0800 ${epoch} ${unknownBody}`));
    socket.write(frame(`08${number} ${epoch} ${unknownBody}`));
    const body = `42 05 ${unknownField}`; // Done, with a field more
    socket.write(frame(`08${number} ${epoch} ${body}`));
  });
  const hold = { $case: 'hold', value: { byte: 1n } } as const;
  expect(await link.call(hold, 'done', 5_000)).toEqual({ count: 0 });
  expect([unknown(), link.usable]).toEqual([2, true]);
});

it('a refusal under a code that is not known is one that may be tried again or not, as the node says', async () => {
  const failure = '52 0b 0a054f54484552 12026e6f'; // code "OTHER", message "no"
  const { link } = await connect((socket, { id }) =>
    socket.write(frame(`08${id.toString(16).padStart(2, '0')} ${epoch} ${failure}`)),
  );
  const hold = { $case: 'hold', value: { byte: 1n } } as const;
  await expect(link.call(hold, 'done', 5_000)).rejects.toMatchObject({
    code: 'IO',
    message: 'OTHER: no',
    retry: false,
  });
  expect(link.usable).toBe(true);
});
