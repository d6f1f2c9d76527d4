/**
 * Streams of one coordinator that share a call to each worker: a worker that stands still holds up its own alone, and these go on
 * elsewhere; a client that does not read holds up nobody, and costs no more than what it asked for.
 */
import { mkdtempSync, rmSync } from 'node:fs';
import { request as ask, type ClientRequest, type IncomingMessage } from 'node:http';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { waitUntil } from '@kvtier/cli';
import { event, ScriptedEngine } from '@kvtier/registry/testing';
import { afterEach, expect, it } from 'vitest';
import { freePort } from '../../infra/ports.ts';
import { modelDir, Service } from '../faults/engine-rig.ts';
import { answersLiveBytes } from '../faults/live-bytes.ts';
import { ClusterRig, type Request, sharedPrompts } from './cluster-rig.ts';
import { CpuWaits } from './cpu-waits.ts';

/** A client's streamed answer as it comes. */
class Stream {
  readonly tokenIds: number[] = [];
  /** When each piece came. */
  readonly atMs: number[] = [];
  worker = '';
  readonly ended: Promise<void>;
  #request!: ClientRequest;
  #response: IncomingMessage | undefined;

  constructor(url: string, asked: object, reads = true) {
    const body = JSON.stringify({ ...asked, ignore_eos: true, stream: true, return_token_ids: true });
    const headers = { 'content-type': 'application/json', 'content-length': Buffer.byteLength(body) };
    this.ended = new Promise((resolve, reject) => {
      this.#request = ask(`${url}/v1/completions`, { method: 'POST', headers, agent: false }, (response) => {
        this.#response = response;
        this.worker = String(response.headers['x-kvtier-worker']);
        if (response.statusCode !== 200) reject(new Error(`status ${response.statusCode}`));
        if (reads) this.#read(response, resolve, reject);
        else this.read = () => this.#read(response, resolve, reject);
      });
      this.#request.once('error', reject);
      this.#request.end(body);
    });
    this.ended.catch(() => {});
  }

  get answered(): boolean {
    return this.#response !== undefined;
  }

  /** Of one that did not read: it does from now on. */
  read = (): void => {};

  leave(): void {
    this.#request.destroy();
  }

  /** The longest time without a piece, between two moments; up to the end at most. */
  longestGapMs(fromMs: number, toMs = Number.POSITIVE_INFINITY): number {
    const within = [fromMs, ...this.atMs.filter((at) => at > fromMs && at < toMs), Math.min(toMs, this.atMs.at(-1)!)];
    return Math.max(...within.slice(1).map((at, i) => at - within[i]!));
  }

  #read(response: IncomingMessage, resolve: () => void, reject: (why: Error) => void): void {
    let rest = '';
    let finished = false;
    response.setEncoding('utf8').on('data', (text: string) => {
      this.atMs.push(performance.now());
      const lines = (rest + text).split('\n');
      rest = lines.pop()!;
      for (const line of lines) {
        if (line === 'data: [DONE]') finished = true;
        if (!line.startsWith('data: {')) continue;
        const { choices, error } = JSON.parse(line.slice(6));
        if (error) reject(new Error(error.message));
        for (const id of choices?.[0]?.token_ids ?? []) this.tokenIds.push(id);
      }
    });
    response.once('end', () => (finished ? resolve() : reject(new Error('the stream broke off'))));
    response.once('error', reject);
  }
}

const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

it('a worker that stands still: streams of the other go on, its own go on there, and all are right', {
  timeout: 300_000,
}, async () => {
  const rig = await ClusterRig.start({ workers: 2, nodes: 0, coordinators: 1 });
  ends.push(() => rig.close());
  const prompts: Request[] = sharedPrompts(8, 8, 10);
  const streamsTo = (tokens: number, count = prompts.length): Stream[] =>
    prompts.slice(0, count).map((request) => new Stream(rig.url(0), { ...request, max_tokens: tokens }));
  const beforehand = streamsTo(900);
  await Promise.all(beforehand.map(({ ended }) => ended));
  const usualMs = Math.max(...beforehand.map((stream) => stream.longestGapMs(stream.atMs[0]!)));

  // More than they come to: they are left when all has been seen.
  const streams = streamsTo(4_000);
  const at = (name: string): Stream[] => streams.filter(({ worker }) => worker === name);
  const begun = (): Promise<void> =>
    waitUntil('all streams have begun', 60_000, async () => streams.every(({ tokenIds }) => tokenIds.length > 20));
  await begun();
  // Who is slow to say what it has to do gets little: until both have some.
  while (streams.length < 16 && (at('worker-0').length === 0 || at('worker-1').length === 0)) {
    streams.push(...streamsTo(4_000, 4));
    await begun();
  }
  const stopped = at('worker-0');
  const others = at('worker-1');
  expect(stopped.length).toBeGreaterThan(0);
  expect(others.length).toBeGreaterThan(0);
  const sinceMs = performance.now();
  const waits = new CpuWaits(() => rig.stages);
  const before = others.map(({ tokenIds }) => tokenIds.length);
  const reached = stopped.map(({ tokenIds }) => tokenIds.length);
  await rig.workers[0]!.signal('SIGSTOP');
  ends.push(() => rig.workers[0]!.signal('SIGCONT'));
  const haveGoneOn = async (): Promise<boolean> =>
    performance.now() - sinceMs > 1_000 &&
    stopped.every(({ tokenIds }, i) => tokenIds.length > reached[i]! + 100) &&
    others.every(({ tokenIds }, i) => tokenIds.length > before[i]! + 100);
  await waitUntil('all of them have gone on', 120_000, haveGoneOn);
  const waitedMs = waits.ms;
  for (const stream of streams) stream.leave();
  const longest = Math.max(...streams.map(({ tokenIds }) => tokenIds.length));
  await rig.workers[0]!.signal('SIGCONT');
  const right = streamsTo(longest);
  await Promise.all(right.map(({ ended }) => ended));
  for (const [number, { tokenIds }] of streams.entries())
    expect(tokenIds).toEqual(right[number < 8 ? number : number % 4]!.tokenIds.slice(0, tokenIds.length));
  // None of them was at its end.
  expect(longest).toBeLessThan(4_000);
  // While nobody knows yet that it stands still.
  for (const stream of others)
    expect(stream.longestGapMs(sinceMs, sinceMs + 800)).toBeLessThan(400 + usualMs + waitedMs);
  for (const stream of stopped) {
    expect(stream.longestGapMs(sinceMs)).toBeLessThan(2_000 + usualMs + waitedMs);
    expect(stream.longestGapMs(sinceMs)).toBeGreaterThan(500);
  }
});

it('clients that do not read: other streams of the same call go on, and memory is what was asked for', {
  timeout: 300_000,
}, async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvs-'));
  ends.push(() => rmSync(folder, { recursive: true, force: true }));
  const engine = new ScriptedEngine(`unix:${folder}/e`, modelDir);
  engine.description = { ...engine.description, maxModelTokens: 1 << 20 };
  const [slowTokens, perEvent] = [300_000, 500];
  const idAt = (at: number): number => 200 + ((at * 7) % 3_000);
  const quickTokens = 1_000;
  engine.script = async (call, { maxTokens }) => {
    const isSlow = maxTokens === slowTokens;
    let left = false;
    call.on('cancelled', () => {
      left = true;
    });
    for (let given = 0; given < maxTokens && !left; ) {
      const tokens = Math.min(isSlow ? perEvent : 1, maxTokens - given);
      const tokenIds = Array.from({ length: tokens }, (_, i) => idAt(given + i));
      given += tokens;
      call.write(event({ tokenIds, finishReason: given === maxTokens ? 'length' : '' }));
      await new Promise((resolve) => setTimeout(resolve, 10));
    }
    call.end();
  };
  await engine.start();
  ends.push(() => engine.stop());
  const port = await freePort();
  const settings = {
    ...{ host: '127.0.0.1', port, logLevel: 'warn' },
    discovery: { kind: 'static', workers: [{ name: 'e', address: `unix:${folder}/e` }], nodes: [] },
  };
  const coordinator = new Service('coordinator', settings, answersLiveBytes);
  await coordinator.start();
  ends.push(() => coordinator.signal('SIGKILL'));
  const url = `http://127.0.0.1:${port}`;
  const quick = (): Stream => new Stream(url, { prompt: 'a', max_tokens: quickTokens });
  const alone = quick();
  await alone.ended;
  const usualMs = alone.longestGapMs(alone.atMs[0]!);
  const beforeBytes = await coordinator.liveBytes();

  const slow = Array.from({ length: 8 }, () => new Stream(url, { prompt: 'b', max_tokens: slowTokens }, false));
  await waitUntil('all are answered', 60_000, async () => slow.every(({ answered }) => answered));
  const waits = new CpuWaits(() => [[coordinator.pid]]);
  const beside = [quick(), quick()];
  await Promise.all(beside.map(({ ended }) => ended));
  expect(engine.manyCalls).toBe(1);
  for (const stream of beside) {
    expect(stream.tokenIds).toEqual(Array.from({ length: quickTokens }, (_, at) => idAt(at)));
    expect(stream.longestGapMs(stream.atMs[0]!)).toBeLessThan(500 + usualMs + waits.ms);
  }
  // 2.4 million tokens have been asked for. As chunks of text they would be some 50 bytes each; ids are 8, in arrays that grow by half.
  expect((await coordinator.liveBytes()) - beforeBytes).toBeLessThan(40 * 2 ** 20);
  // What was kept for one that reads at last is all, and in order.
  for (const stream of slow.slice(1)) stream.leave();
  slow[0]!.read();
  await slow[0]!.ended;
  expect(slow[0]!.tokenIds.length).toBe(slowTokens);
  expect(slow[0]!.tokenIds.every((id, at) => id === idAt(at))).toBe(true);
});
