/** What the planner makes of pods: of streams that are spread over more of them, and of answers that come as a whole. */
import { plannerSchema } from '@kvtier/config';
import { factsOf, recordOf } from '@kvtier/dispatch/testing';
import type { Worker } from '@kvtier/registry';
import { PodLoad, StepLine, scrapeOf } from '@kvtier/registry/testing';
import { beforeEach, expect, it } from 'vitest';
import { Planner } from './planner.ts';

const idle = await scrapeOf('p', 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n');
const prefillTokensPerS = 10_000;

let nowMs: number;
let pods: FakePod[];
let planner: Planner;
beforeEach(() => {
  nowMs = 1_000_000;
  pods = [];
  planner = new Planner({
    workers: { workers: () => pods.map(({ worker }) => worker), lean: () => {} },
    config: plannerSchema.parse({ windowMs: 60_000 }),
    now: () => nowMs,
  });
});

/** As the fleet does for all pods of one model. */
function usualStepPerRequestS(): number {
  return StepLine.slopeOf(pods.map(({ load }) => load.stepLine));
}

class FakePod {
  readonly load = new PodLoad(() => nowMs);
  readonly worker: Worker;
  readonly #stepS: (streams: number) => number;
  #counted = { intervals: 0, intervalS: 0 };

  constructor(number: number, stepS: (streams: number) => number) {
    const { load } = this;
    this.#stepS = stepS;
    this.worker = {
      ...{ number, record: recordOf(`p${number}`, { kind: 'openai', role: 'decode' }), state: 'ready', why: undefined },
      facts: factsOf({ totalBlocks: 10_000, maxRunning: undefined }),
      get load() {
        return load.load(10_000, () => prefillTokensPerS, usualStepPerRequestS);
      },
    };
  }

  /** So many streams ran since the scrape before. */
  ran(running: number, seconds: number): void {
    const stepS = this.#stepS(running);
    const { intervals, intervalS } = this.#counted;
    if (running > 0)
      this.#counted = { intervals: intervals + (running * seconds) / stepS, intervalS: intervalS + running * seconds };
    const told = { ...idle, ...this.#counted, running, usedShare: (running * 50) / 10_000 };
    this.load.scraped(told, nowMs, this.load.open, nowMs);
  }
}

/** A step of 10 ms, and 0.1 ms more a stream: 64 of them take 16 ms, and 50 ms are allowed. */
const flat = (streams: number): number => 0.01 + 0.0001 * streams;

/** So many streams in all, at each half of a second, for so long. KEDA asks at each minute. */
function run(minutes: number, streamsAt: (tick: number) => number): void {
  for (let minute = 0; minute < minutes; minute++) {
    for (let tick = 0; tick < 120; tick++) {
      const streams = streamsAt(minute * 120 + tick);
      for (const [at, pod] of pods.entries())
        pod.ran(Math.floor(streams / pods.length) + (at < streams % pods.length ? 1 : 0), 0.5);
      planner.tick();
      nowMs += 500;
    }
    const { decode, isDecodeKnown } = planner.plans()[0]!;
    if (isDecodeKnown) while (pods.length < Math.min(decode.workers, 16)) pods.push(new FakePod(pods.length, flat));
  }
}

it.each<[string, (tick: number) => number]>([
  ['always as many', () => 16],
  ['now more, now fewer', (tick) => 16 + Math.round(6 * Math.sin(tick / 20))],
  ['none for a while, then as many', (tick) => (tick % 240 < 60 ? 0 : 20)],
])('16 streams are what one pod gives, and take no second one: %s', (_, streamsAt) => {
  pods.push(new FakePod(0, flat));
  run(14, streamsAt);
  expect(pods.length).toBe(1);
});

it('streams of one pod are not taken for more because they are spread over several', () => {
  for (let number = 0; number < 4; number++) pods.push(new FakePod(number, flat));
  run(4, (tick) => 16 + (tick % 3));
  const { decode, isDecodeKnown } = planner.plans()[0]!;
  expect(isDecodeKnown).toBe(true);
  // 17 in steps of some 10.4 ms, of 200 that have room in steps of 30 ms.
  expect(decode.needed).toBeCloseTo(0.31, 1);
});

it('what a stream adds is not known of pods that had always as many; where steps are too long more are needed', () => {
  pods.push(new FakePod(0, flat));
  run(2, () => 16);
  expect(planner.plans()[0]!.isDecodeKnown).toBe(false);
  // With 100 streams a step of this one takes 60 ms.
  pods[0] = new FakePod(0, () => 0.06);
  run(1, () => 100);
  expect(planner.plans()[0]!.isDecodeKnown).toBe(true);
  expect(planner.plans()[0]!.decode.needed).toBeGreaterThan(1);
});

it.each([100, 50, 10, 4])('one pod is as much whatever share of its answers is streamed: %i of 100', async (share) => {
  const pod = new FakePod(0, () => 0.015);
  pods.push(pod);
  const dispatch = planner.watch({
    choose: async () => {
      const sent = pod.load.send({ tokensAhead: 200, blocks: 32, loadS: 0 }, nowMs, () => {});
      return {
        ...{ worker: pod.worker, policy: '', why: '', firstTokenS: 0, isGuessed: false },
        ...{
          match: { blocks: 0, byMedium: new Int32Array(1) },
          share: { requestId: '', tokensAhead: 200, blocks: 32, loadS: 0 },
        },
        firstToken: (isTimed) => sent.firstToken(isTimed),
        ended: () => sent.ended(),
      };
    },
  });
  const never = new AbortController().signal;
  const live: { readonly endMs: number; end(): void }[] = [];
  let count = 0;
  // 30 answers of 300 tokens are under way at any time, 15 ms between two tokens; for three minutes.
  for (let tenth = 0; tenth < 1_800; tenth++, nowMs += 100) {
    while (live.length > 0 && live[0]!.endMs <= nowMs) live.shift()!.end();
    for (let come = Math.floor(((tenth + 1) * 2) / 3) - Math.floor((tenth * 2) / 3); come > 0; come--) {
      const choice = await dispatch.choose(
        {
          ...{ id: `r${count}`, model: 'demo', among: undefined, except: new Set<string>(), session: '' },
          ...{ tokens: 200, blockTokens: 16, maxTokens: 300, keys: new Int32Array(0) },
        },
        never,
      );
      if (count++ % 100 < share) choice.firstToken(true);
      live.push({ endMs: nowMs + 4_500, end: () => choice.ended(300) });
    }
    if (tenth % 5 === 0) {
      pod.ran(live.length, 0.5);
      planner.tick();
    }
  }
  const { decode, load } = planner.plans()[0]!;
  expect(load.outputTokensPerS / 2_000).toBeCloseTo(1, 1);
  // 30 streams, of 200 that have room, to 80 %.
  expect(decode.needed).toBeCloseTo(0.19, 1);
});
