/** A replay endpoint where nobody answers, or nobody who tells snapshots, beside a publisher that speaks. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Publisher, Router } from 'zeromq';
import { encodeBatch } from './codec.ts';
import type { KvEvent } from './event.ts';
import { decodeSeq, encodeSeq, endOfReplay, snapshotRequest } from './frames.ts';
import { KvEventSubscriber } from './subscriber.ts';

const limit = { timeout: 20_000, interval: 5 };
let folder: string;
const ends: (() => unknown)[] = [];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-ev-'));
});
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
  rmSync(folder, { recursive: true });
});

const event = (hash: number): KvEvent => ({ type: 'BlockRemoved', blockHashes: [BigInt(hash)], medium: 'GPU' });
const payloadOf = (ts: number, ...events: KvEvent[]): Buffer => encodeBatch({ ts, events, dataParallelRank: null });
/** From so far on nobody has batches: who asks for these only wants to know whether somebody answers. */
const knock = Number.MAX_SAFE_INTEGER;

/** What comes of the publisher, and how many had been asked in vain by then. */
interface Said {
  readonly what: number | string;
  readonly unanswered: number;
}

async function rig(silenceMs: number, answers = { replays: false, snapshots: false }) {
  const [endpoint, replayEndpoint] = [`ipc://${folder}/pub`, `ipc://${folder}/replays`];
  const publisher = new Publisher({ linger: 0 });
  const router = new Router({ linger: 0 });
  ends.push(() => publisher.close());
  ends.push(() => router.close());
  await publisher.bind(endpoint);
  await router.bind(replayEndpoint);
  const batches: Buffer[] = [];
  const asked: (number | 'snapshot')[] = [];
  void (async () => {
    for await (const [client, , start] of router) {
      const from = start!.equals(snapshotRequest) ? 'snapshot' : decodeSeq(start)!;
      asked.push(from);
      if (!(from === 'snapshot' ? answers.snapshots : answers.replays)) continue;
      const page = [client!, '', 'kv', encodeSeq(batches.length), payloadOf(batches.length)];
      if (from === 'snapshot') await router.send(page);
      else
        for (let seq = from; seq < batches.length; seq++)
          await router.send([client!, '', 'kv', encodeSeq(seq), batches[seq]!]);
      await router.send([client!, '', '', endOfReplay, '']);
    }
  })().catch(() => undefined); // it is closed in the middle of an answer
  const subscriber = new KvEventSubscriber({ endpoint, replayEndpoint, replayDeadlineMs: silenceMs });
  const said: Said[] = [];
  const ended = (async () => {
    for await (const item of subscriber) {
      const what = item.kind === 'batch' ? item.seq : item.kind;
      said.push({ what, unanswered: subscriber.stats().unanswered });
    }
  })();
  ends.push(async () => {
    subscriber.close();
    await ended;
  });
  const publish = async (isLost = false): Promise<number> => {
    const seq = batches.length;
    batches.push(payloadOf(seq, event(seq)));
    if (!isLost) await publisher.send(['kv', encodeSeq(seq), batches[seq]!]);
    return seq;
  };
  const whats = (): (number | string)[] => said.map(({ what }) => what);
  /** Something has come, and all that was said since. */
  const hears = async (): Promise<void> => {
    await vi.waitFor(async () => {
      await publish();
      expect(whats().some((what) => typeof what === 'number')).toBe(true);
    }, limit);
    const seq = await publish();
    await vi.waitFor(() => expect(whats()).toContain(seq), limit);
  };
  return { subscriber, said, whats, asked, answers, publish, hears };
}

it('holds up what is said once, and never again; once it answers that is known soon', async () => {
  const { subscriber, said, asked, answers, publish, hears } = await rig(2_000);
  await hears();
  const { length } = asked;
  await vi.waitFor(() => expect(asked.length).toBeGreaterThan(length), limit);
  const { unanswered } = subscriber.stats();
  const seq = await publish();
  await vi.waitFor(() => expect(said.map(({ what }) => what)).toContain(seq), limit);
  // It is there while that question is still open.
  expect(said.find(({ what }) => what === seq)).toEqual({ what: seq, unanswered });
  await vi.waitFor(() => expect(subscriber.stats().unanswered).toBe(unanswered + 1), limit);
  expect(asked.slice(0, length + 1)).toEqual(['snapshot', ...Array<number>(length).fill(knock)]);
  Object.assign(answers, { replays: true, snapshots: true });
  await vi.waitFor(() => expect(subscriber.stats().unanswered).toBe(0), limit);
}, 60_000);

it('makes void what was said before, once, when nothing else comes', async () => {
  const { subscriber, whats, publish, hears } = await rig(500);
  await hears();
  await vi.waitFor(() => expect(whats().at(-1)).toBe('gap'), limit);
  const { unanswered, gaps } = subscriber.stats();
  await vi.waitFor(() => expect(subscriber.stats().unanswered).toBeGreaterThan(unanswered), limit);
  const { length } = whats();
  expect([subscriber.stats().gaps, whats().at(-1)]).toEqual([gaps, 'gap']);
  const seq = await publish();
  await vi.waitFor(() => expect(whats().length).toBeGreaterThan(length), limit);
  expect(whats().slice(length)).toEqual([seq]);
}, 60_000);

it('of one who is never quiet: that it answers again is known all the same', async () => {
  const { subscriber, whats, answers, publish, hears } = await rig(300, { replays: true, snapshots: true });
  await vi.waitFor(() => expect(whats()).toContain('snapshot'), limit);
  await hears();
  Object.assign(answers, { replays: false, snapshots: false });
  await vi.waitFor(() => expect(subscriber.stats().unanswered).toBe(1), limit);
  Object.assign(answers, { replays: true, snapshots: true });
  await vi.waitFor(
    async () => {
      await publish();
      expect(subscriber.stats().unanswered).toBe(0);
    },
    { timeout: 10_000, interval: 100 },
  );
}, 60_000);

it('where snapshots alone are not told, what was lost comes by replays; a snapshot, once it is told', async () => {
  const { subscriber, whats, asked, answers, publish, hears } = await rig(300, { replays: true, snapshots: false });
  await hears();
  const lost = await publish(true);
  await vi.waitFor(() => expect(whats()).toContain(lost), limit);
  await vi.waitFor(() => expect(asked.filter((from) => from === 'snapshot').length).toBeGreaterThan(2), limit);
  expect(subscriber.stats()).toMatchObject({ unanswered: 0, snapshots: 0 });
  answers.snapshots = true;
  await vi.waitFor(() => expect(whats()).toContain('snapshot'), limit);
}, 60_000);
