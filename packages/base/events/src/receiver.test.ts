/** What native code takes from a real ZeroMQ publisher, and how it tells it. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { Publisher } from 'zeromq';
import { encodeBatch } from './codec.ts';
import { encodeSeq } from './frames.ts';
import { type PackedBatch, PackedDecoder, record } from './packed-decoder.ts';
import { EventReceiver, messagesOf } from './receiver.ts';

let folder: string;
let publisher: Publisher;
let endpoint: string;
const receivers: EventReceiver[] = [];
beforeEach(async () => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-receiver-'));
  endpoint = `ipc://${folder}/pub`;
  publisher = await bound();
});
afterEach(() => {
  for (const receiver of receivers.splice(0)) receiver.close();
  publisher.close();
  rmSync(folder, { recursive: true });
});

async function bound(): Promise<Publisher> {
  const socket = new Publisher({ linger: 0, sendHighWaterMark: 100_000 });
  await socket.bind(endpoint);
  return socket;
}

function open(): EventReceiver {
  const receiver = new EventReceiver({
    ...{ endpoint, topic: '', hwm: 100_000, maxMessageBytes: 2 ** 20, heartbeatMs: 5_000, curve: null },
  });
  receivers.push(receiver);
  return receiver;
}

const payload = (hash: number): Buffer =>
  encodeBatch(
    { ts: 1.5, events: [{ type: 'BlockRemoved', blockHashes: [BigInt(hash)], medium: 'GPU' }], dataParallelRank: null },
    {},
  );
const send = (seq: number, topic = ''): Promise<void> => publisher.send([topic, encodeSeq(seq), payload(seq)]);

/** Follows until the message whose sequence number is `last`; what was before the first one is left out. */
async function follow(receiver: EventReceiver, last: number) {
  const decoder = new PackedDecoder();
  const bursts: { seqs: number[]; topics: string[]; hashes: number[]; lastPayload: string }[] = [];
  let foreign = 0;
  for (;;) {
    const burst = (await receiver.next(decoder.encodedNames, false))!;
    foreign += burst.foreign;
    const batchAt = (words: Int32Array, from: number): PackedBatch => decoder.batchAt(words, from);
    const messages = [...messagesOf(burst, batchAt)];
    const hashes = messages.map(({ batch }) => batch!.words[batch!.from + record.head]!);
    const lastPayload = Buffer.from(messages.at(-1)?.payload ?? []).toString('hex');
    bursts.push({
      seqs: messages.map(({ seq }) => seq),
      topics: messages.map(({ topic }) => topic),
      hashes,
      lastPayload,
    });
    if (bursts.at(-1)!.seqs.includes(last)) return { bursts, foreign };
  }
}

/** Until this receiver gets what is sent. */
async function connected(receiver: EventReceiver): Promise<void> {
  let isConnected = false;
  // A connection is told before the publisher knows what it is for.
  const come = async (): Promise<void> => {
    while ((await receiver.next(null, false))!.messages === 0);
    isConnected = true;
  };
  const first = come();
  while (!isConnected) {
    await publisher.send(['', encodeSeq(0), payload(0)]);
    await Promise.race([first, new Promise((resolve) => setTimeout(resolve, 5))]);
  }
}

it('messages that follow each other come together, decoded; the last one with its payload', async () => {
  const receiver = open();
  await connected(receiver);
  for (let seq = 1_000; seq < 2_000; seq++) await send(seq);
  for (let seq = 3_000; seq < 3_010; seq++) await send(seq);
  const { bursts } = await follow(receiver, 3_009);
  const told = bursts.filter(({ seqs }) => seqs.some((seq) => seq >= 1_000));
  const seqs = told.flatMap((burst) => burst.seqs);
  expect(seqs).toEqual(
    [...Array(1_000).keys()].map((i) => 1_000 + i).concat([...Array(10).keys()].map((i) => 3_000 + i)),
  );
  expect(told.flatMap(({ hashes }) => hashes)).toEqual(seqs);
  expect(told.length).toBeLessThan(500);
  for (const burst of told) {
    expect(burst.seqs).toEqual(burst.seqs.map((_, i) => burst.seqs[0]! + i));
    expect(burst.lastPayload).toBe(payload(burst.seqs.at(-1)!).toString('hex'));
  }
});

it('topics are told, however many there are; what is no message of this protocol is counted', async () => {
  const receiver = open();
  await connected(receiver);
  for (let i = 0; i < 100; i++) await send(1_000 + i, `topic ${i % 40}`);
  for (let i = 0; i < 300; i++) await publisher.send(['two', 'frames']);
  await publisher.send(['', 'short', payload(1)]);
  await publisher.send(['', Buffer.alloc(8, 0xff), payload(1)]);
  await publisher.send(['', encodeSeq(5), payload(1), 'four']);
  await send(2_000);
  const { bursts, foreign } = await follow(receiver, 2_000);
  expect(foreign).toBe(303);
  const topics = bursts.flatMap((burst) => burst.topics.filter((_, i) => burst.seqs[i]! >= 1_000));
  expect(topics).toEqual([...Array.from({ length: 100 }, (_, i) => `topic ${i % 40}`), '']);
});

it('what it cannot read is told as payloads; all of it, when nothing else is asked for', async () => {
  const receiver = open();
  await connected(receiver);
  await publisher.send(['', encodeSeq(7), 'no batch']);
  let messages: { seq: number; payload: Uint8Array }[] = [];
  const never = (): never => {
    throw new Error('decoded');
  };
  while (messages.at(-1)?.seq !== 7)
    messages = [...messagesOf((await receiver.next(new PackedDecoder().encodedNames, false))!, (_, from) => from)];
  expect(Buffer.from(messages.at(-1)!.payload).toString()).toBe('no batch');
  await send(8);
  while (messages.at(-1)?.seq !== 8) messages = [...messagesOf((await receiver.next(null, false))!, never)];
  expect(messages.at(-1)!.payload).toEqual(payload(8));
});

it('who is closed has its end, also while it waits; others go on, though publishers end at the same moment', async () => {
  for (let round = 0; round < 20; round++) {
    const closing = [open(), open(), open()];
    for (const receiver of closing) await connected(receiver);
    publisher.close();
    const ends = closing.map(async (receiver) => {
      for (;;) if ((await receiver.next(null, false)) === null) return;
    });
    for (const receiver of closing) receiver.close();
    await Promise.all(ends);
    expect(await closing[0]!.next(null, false)).toBeNull();
    publisher = await bound();
  }
  const receiver = open();
  await connected(receiver);
});

it('as many are open at once as there may be members', () => {
  // More than ZeroMQ has sockets for of itself. Each takes three, and as many files.
  for (let i = 0; i < 400; i++) open();
  expect(receivers).toHaveLength(400);
});
