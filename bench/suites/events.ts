/**
 * KV events on the wire: batches as engines make them, published and consumed over a Unix socket, beside plain ZeroMQ messages
 * of the same bytes by the same library, in turns (what the transport alone takes). As with events, each plain message lies in memory of
 * its own and its bytes are written there just before it is sent: a copy into memory that is warm and used again, the least that any sender
 * does. Both have sent what fills the replay buffer, by bytes or by batches, before anything counts: an engine publishes for days, and the memory
 * that it begins with is paid once. Then the engine's steps while blocks are stored and evicted, with events published and without.
 * Consumers are processes of their own, as a router is, and must see every event; the steps, too, have one that follows.
 *
 * A step is told twice. `step_cpu_with_events`: CPU of the engine's process, all its threads (ZeroMQ's and the garbage collector's with
 * them), which is what publishing costs. `step_with_events`: from step to step on the clock, which on a machine of two cores is also what the consumer
 * takes from it.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { join } from 'node:path';
import { setImmediate, setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';
import { KvError } from '@kvtier/errors';
import { KvEventPublisher, PackedEncoder } from '@kvtier/events';
import { ChainHasher, SequenceHashes } from '@kvtier/identity';
import { EventLog, type PackedEvents } from '@kvtier/prefix-cache';
import { Engine, noConnector } from '@kvtier/scheduler';
import { Publisher } from 'zeromq';
import { argumentsOf } from '../arguments.ts';
import { type Figure, median, rate, type Suite, time } from '../figures.ts';
import { IdleExecutor } from '../idle-executor.ts';

const rounds = 11;
/** 64 MiB of replay buffer, twice. */
const warmUpBytes = 128 * 2 ** 20;
const mostWarmUpRounds = 15;
const roundDeadlineMs = 60_000;
/** Fewer than ZeroMQ queues for a subscriber, so that none is dropped. */
const batchesPerRound = 2_000;
const blockTokens = 16;
/** One stored run and as many removals: an event each. Counted are blocks, which are what a router lives on. */
const shapes = [
  { name: 'decode', blocks: 1 },
  { name: 'prefill', blocks: 32 },
] as const;

/** Steps of requests that share nothing, in a pool that turns over: each stores and evicts what two prompts and the answers take. */
const poolBlocks = 24_576;
const requests = 256;
const promptTokens = 1_024;
const answerTokens = 128;
const maxStepTokens = 2_304;
const steps = 1_500;

/** As a block pool notes them. */
function eventsOf(blocks: number): EventLog {
  const hashes = new SequenceHashes(new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }));
  const tokens = Uint32Array.from({ length: 2 * blocks * blockTokens }, (_, i) => (i * 7_919) % 128_000);
  hashes.append(tokens);
  const { words, wordsPerHash } = hashes.packedWords;
  const log = new EventLog(true);
  for (let i = blocks; i < 2 * blocks; i++) log.addRemoved(words, i * wordsPerHash, wordsPerHash, 0);
  const stored = Array.from({ length: blocks }, (_, i) => i);
  const description = {
    ...{ loraId: null, loraName: null, isPlain: true },
    tokenIds: (first: number, end: number) => tokens.subarray(first, end),
    copyTokens: (first: number, count: number, target: Uint32Array, at: number) =>
      target.set(tokens.subarray(first, first + count), at),
    extraKeys: () => null,
  };
  log.addStored({
    ...{ hashes, description, first: 0, end: blocks, blocks: stored, places: stored, parent: -1 },
    ...{ blockTokens, group: 0, kind: 'full_attention', windowTokens: null },
  });
  return log;
}

class Consumer {
  readonly #child: ChildProcess;

  constructor(mode: 'events' | 'plain', endpoint: string) {
    const script = fileURLToPath(new URL('../scripts/events-consumer.ts', import.meta.url));
    this.#child = spawn(process.execPath, ['--import', import.meta.resolve('tsx'), script, mode, endpoint], {
      stdio: ['ignore', 'inherit', 'inherit', 'ipc'],
    });
  }

  /** Resolves when messages arrive; `say` sends one that does not count. */
  async ready(say: () => Promise<void> | void): Promise<void> {
    let isReady = false;
    const first = this.#next().then(() => {
      isReady = true;
    });
    while (!isReady) {
      await say();
      await Promise.race([first, sleep(20)]);
    }
  }

  /** Resolves to the events of the next `batches` batches, and the gaps seen so far. */
  expect(batches: number): Promise<{ events: number; gaps: number }> {
    const answer = this.#next();
    this.#child.send({ expect: batches });
    return answer as Promise<{ events: number; gaps: number }>;
  }

  async close(): Promise<void> {
    if (this.#child.exitCode !== null) return;
    const exit = once(this.#child, 'exit');
    this.#child.disconnect();
    await exit;
  }

  async #next(): Promise<unknown> {
    const done = new AbortController();
    const signal = AbortSignal.any([AbortSignal.timeout(roundDeadlineMs), done.signal]);
    const gone = once(this.#child, 'exit', { signal }).then(
      () => undefined,
      () => undefined,
    );
    try {
      const message = await Promise.race([once(this.#child, 'message', { signal }), gone]);
      if (message !== undefined) return message[0];
    } catch {
      throw new KvError('DEADLINE', `events bench: not all batches arrived within ${roundDeadlineMs / 1_000} s: void`);
    } finally {
      done.abort();
    }
    throw new KvError('SETUP', 'events bench: its consumer ended; see what it said above');
  }
}

/** Blocks per second that leave the publisher, and that arrive decoded. */
interface Rates {
  readonly sent: number;
  readonly arrived: number;
}

async function measure(consumer: Consumer, blocks: number, send: () => Promise<void>, wanted: number): Promise<Rates> {
  const arrival = consumer.expect(batchesPerRound);
  const start = performance.now();
  await send();
  const sentMs = performance.now() - start;
  const { events, gaps } = await arrival;
  const arrivedMs = performance.now() - start;
  if (events !== wanted || gaps > 0) {
    throw new KvError('CORRUPT', `events bench: ${events} of ${wanted} events arrived with ${gaps} gaps: void`);
  }
  const perSecond = (ms: number): number => (batchesPerRound * blocks * 1_000) / ms;
  return { sent: perSecond(sentMs), arrived: perSecond(arrivedMs) };
}

async function measureShape(scratchDir: string, { name, blocks }: (typeof shapes)[number]): Promise<Figure[]> {
  const packed = eventsOf(blocks).takePacked();
  const payload = new PackedEncoder({}).encode(packed, Date.now() / 1_000, null);
  const payloads = Array.from({ length: batchesPerRound }, () => Buffer.from(payload));
  const [ours, plain]: [Rates[], Rates[]] = [[], []];
  const publisher = await KvEventPublisher.start({
    endpoint: `ipc://${join(scratchDir, `${name}-events`)}`,
    gatherMs: 0,
  });
  const socket = new Publisher({ linger: 0, sendHighWaterMark: 10_000 });
  await socket.bind(`ipc://${join(scratchDir, `${name}-plain`)}`);
  const consumers = [new Consumer('events', publisher.endpoint), new Consumer('plain', socket.lastEndpoint!)] as const;
  try {
    await consumers[0].ready(() => publisher.publish([{ type: 'AllBlocksCleared' }]));
    await consumers[1].ready(() => socket.send(['', Buffer.alloc(8), Buffer.alloc(1)]));
    const total = batchesPerRound * packed.count;
    const warmUps = Math.min(mostWarmUpRounds, Math.ceil(warmUpBytes / (payload.length * batchesPerRound)));
    for (let round = -warmUps; round < rounds; round++) {
      const publish = async (): Promise<void> => {
        for (let i = 0; i < batchesPerRound; i++) publisher.publishPacked(packed);
        while (publisher.stats().queuedBatches > 0) await setImmediate();
      };
      const send = async (): Promise<void> => {
        for (const each of payloads) {
          each.set(payload);
          await socket.send(['', Buffer.alloc(8), each]);
        }
      };
      const turns = [
        async () => ours.push(await measure(consumers[0], 2 * blocks, publish, total)),
        async () => plain.push(await measure(consumers[1], 2 * blocks, send, batchesPerRound)),
      ];
      for (const turn of round % 2 === 0 ? turns : turns.reverse()) await turn();
      if (round < 0) ours.length = plain.length = 0;
    }
  } finally {
    for (const consumer of consumers) await consumer.close();
    await publisher.close();
    socket.close();
  }
  const of = (rates: readonly Rates[], which: keyof Rates): number => median(rates.map((one) => one[which])) / 1_000;
  const limit = `plain ZeroMQ, ${payload.length} bytes a message`;
  return [
    rate(`${name}_published`, of(ours, 'sent'), 'k blocks/s', of(plain, 'sent'), limit),
    rate(`${name}_consumed`, of(ours, 'arrived'), 'k blocks/s', of(plain, 'arrived'), limit),
  ];
}

/** Microseconds. */
interface StepTimes {
  /** From step to step, the slowest twentieth left out (a busy machine's). */
  readonly clock: number;
  /** Of all threads of this process. */
  readonly cpu: number;
}

async function timeSteps(publisher: KvEventPublisher | null): Promise<StepTimes> {
  const executor = new IdleExecutor({ blockCount: poolBlocks, blockTokens });
  const engine = new Engine({
    executor,
    connector: noConnector,
    hasher: new ChainHasher({ algorithm: 'sha256_cbor', blockTokens }),
    eosTokenIds: [],
    limits: { maxStepTokens, maxSequences: requests, maxWaiting: requests },
    ...(publisher && {
      onPackedEvents: (events: PackedEvents) => publisher.publishPacked(events),
      packedHashBytes: publisher.packedHashBytes,
    }),
  });
  const times: number[] = [];
  const warmUp = steps >> 2;
  let warm = process.cpuUsage();
  let cpu = warm;
  let born = 0;
  let last = performance.now();
  await new Promise<void>((resolve) => {
    const submit = (): void => {
      const which = born++;
      const promptTokenIds = Int32Array.from({ length: promptTokens }, (_, i) => (which * 31 + i * 7) % 30_000);
      promptTokenIds[0] = which % 30_000; // nothing is shared
      const params = { maxTokens: answerTokens, temperature: 0, topK: 0, topP: 1, ignoreEos: true };
      engine.submit({ requestId: String(which), promptTokenIds, ...params }, ({ finishReason }) => {
        if (finishReason === 'length' && times.length < steps) submit();
      });
    };
    executor.onStep = () => {
      const now = performance.now();
      times.push(now - last);
      last = now;
      if (times.length === warmUp) warm = process.cpuUsage();
      if (times.length !== steps) return;
      cpu = process.cpuUsage(warm);
      resolve();
    };
    for (let i = 0; i < requests; i++) submit();
  });
  await engine.close();
  const kept = times.slice(warmUp).sort((a, b) => a - b);
  kept.length = Math.floor(kept.length * 0.95);
  const clock = (kept.reduce((sum, ms) => sum + ms, 0) / kept.length) * 1_000;
  return { clock, cpu: (cpu.user + cpu.system) / (steps - warmUp) };
}

async function measureSteps(scratchDir: string): Promise<Figure[]> {
  const publisher = await KvEventPublisher.start({ endpoint: `ipc://${join(scratchDir, 'steps')}` });
  const consumer = new Consumer('events', publisher.endpoint);
  const [on, off]: [StepTimes[], StepTimes[]] = [[], []];
  try {
    await consumer.ready(() => publisher.publish([{ type: 'AllBlocksCleared' }]));
    const packed = eventsOf(32).takePacked();
    while (publisher.stats().publishedBytes < warmUpBytes) {
      for (let i = 0; i < batchesPerRound; i++) publisher.publishPacked(packed);
      while (publisher.stats().queuedBatches > 0) await setImmediate();
    }
    for (let round = 0; round < rounds; round++) {
      const turns = [async () => off.push(await timeSteps(null)), async () => on.push(await timeSteps(publisher))];
      for (const turn of round % 2 === 0 ? turns : turns.reverse()) await turn();
    }
  } finally {
    await consumer.close();
    await publisher.close();
  }
  // Round by round: the machine's speed changes from one second to the next.
  const figure = (name: string, which: keyof StepTimes, limit: string): Figure => {
    const value = median(on.map((one) => one[which]));
    const share = median(on.map((one, round) => off[round]![which] / one[which]));
    return time(name, value, 'µs', value * share, limit);
  };
  return [
    figure('step_cpu_with_events', 'cpu', 'CPU of the same steps without events'),
    figure('step_with_events', 'clock', 'the same steps without events, nor a consumer at work'),
  ];
}

const suite: Suite = {
  name: 'events',
  description:
    "KV events: blocks told per second, published and consumed, beside plain ZeroMQ; the engine's step with them and without",
  async run({ args, scratchDir }) {
    argumentsOf('events', args, {});
    const figures: Figure[] = [];
    for (const shape of shapes) figures.push(...(await measureShape(scratchDir, shape)));
    figures.push(...(await measureSteps(scratchDir)));
    return figures;
  },
};

export default suite;
