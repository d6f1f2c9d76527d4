/** Answers as publishers of others give them, over real sockets: all at once, and what finds no room is dropped. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Router } from 'zeromq';
import { Continuity } from './continuity.ts';
import { decodeSeq, encodeSeq, endOfReplay } from './frames.ts';
import { type ReplayRequest, requestReplay } from './replay-client.ts';

const held = 5_000;
const payload = Buffer.alloc(2_048, 7);
let folder: string;
const ends: (() => unknown)[] = [];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-ev-'));
});
afterEach(() => {
  for (const end of ends.splice(0).reverse()) end();
  rmSync(folder, { recursive: true });
});

/** What a probe of such a publisher brings. */
async function rig(
  router: ConstructorParameters<typeof Router>[0],
  count: number,
  waits: Pick<ReplayRequest, 'deadlineMs' | 'silenceMs' | 'pauseMs'>,
) {
  const endpoint = `ipc://${folder}/replay`;
  const socket = new Router({ linger: 0, ...router });
  ends.push(() => socket.close());
  await socket.bind(endpoint);
  const asked: number[] = [];
  void (async () => {
    for await (const [client, , start] of socket) {
      asked.push(decodeSeq(start)!);
      for (let seq = asked.at(-1)!; seq < count; seq++) await socket.send([client!, '', 'kv', encodeSeq(seq), payload]);
      await socket.send([client!, '', '', endOfReplay, '']);
    }
  })().catch(() => undefined); // it is closed in the middle of an answer
  const limits = { ...waits, maxMessageBytes: 1 << 20 };
  const { signal } = new AbortController();
  const replay = (fromSeq: number) => requestReplay({ endpoint, ...limits, curve: null, signal, fromSeq });
  const stream = new Continuity(() => ({ ts: 1 }), { replay }, '');
  return { stream, asked };
}

const numbers = (count: number): number[] => Array.from({ length: count }, (_, i) => i);

it('what a publisher dropped of its answer, its end with it, is asked for until all is there', async () => {
  // As Python's: it waits for nobody.
  const { stream, asked } = await rig({ mandatory: false, sendHighWaterMark: 200 }, held, {
    ...{ deadlineMs: 60_000, silenceMs: 15_000, pauseMs: 2_000 },
  });
  const said: (number | string)[] = [];
  for await (const item of stream.probe()) said.push(item.kind === 'batch' ? item.seq : item.kind);
  expect(said).toEqual(numbers(held));
  expect(stream.counts).toMatchObject({ gaps: 0, unanswered: 0 });
  expect(asked.length).toBeGreaterThan(1); // else nothing was dropped
});

it('what is done with the parts of an answer takes as long as it takes', async () => {
  const count = 40;
  const deadlineMs = 20_000;
  let passedMs = 0;
  const now = performance.now.bind(performance);
  const clock = vi.spyOn(performance, 'now').mockImplementation(() => now() + passedMs);
  ends.push(() => clock.mockRestore());
  const router = { mandatory: true, sendHighWaterMark: count + 1 };
  const { stream, asked } = await rig(router, count, { deadlineMs, silenceMs: deadlineMs });
  const said: (number | string)[] = [];
  for await (const item of stream.probe()) {
    said.push(item.kind === 'batch' ? item.seq : item.kind);
    passedMs += (2 * deadlineMs) / count;
  }
  expect([said, asked]).toEqual([numbers(count), [0]]);
});

it('but those of a snapshot, which counts when it is whole, have one deadline together', async () => {
  let passedMs = 0;
  const now = performance.now.bind(performance);
  const clock = vi.spyOn(performance, 'now').mockImplementation(() => now() + passedMs);
  ends.push(() => clock.mockRestore());
  const endpoint = `ipc://${folder}/snapshot`;
  const socket = new Router({ linger: 0, sendHighWaterMark: 101 });
  ends.push(() => socket.close());
  await socket.bind(endpoint);
  void (async () => {
    const [client] = await socket.receive();
    for (let seq = 0; seq < 100; seq++) await socket.send([client!, '', 'kv', encodeSeq(seq), payload]);
  })();
  const { signal } = new AbortController();
  const limits = { deadlineMs: 20_000, silenceMs: 20_000, maxMessageBytes: 1 << 20 };
  let parts = 0;
  const read = async (): Promise<void> => {
    for await (const _ of requestReplay({ endpoint, ...limits, curve: null, signal, fromSeq: 'snapshot' })) {
      parts++;
      passedMs += 3_000;
    }
  };
  await expect(read()).rejects.toMatchObject({ code: 'DEADLINE' });
  expect(parts).toBeLessThanOrEqual(7);
  expect(parts).toBeGreaterThan(0);
});
