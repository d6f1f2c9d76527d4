/** When a request at a pod counts as one whose prompt is computed: by its first token, or where nobody tells it by scrapes and time. */
import fc from 'fast-check';
import { beforeEach, describe, expect, it } from 'vitest';
import { PodLoad } from './pod-load.ts';
import { type Scrape, scrapeOf } from './scrape.ts';
import type { Share } from './sent-ledger.ts';

const idle = await scrapeOf('p', 'vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n');
const tokensPerS = 10_000;
/** At that rate 200 ms. */
const share: Share = { tokensAhead: 2_000, blocks: 10, loadS: 0 };

let nowMs: number;
let pod: PodLoad;
beforeEach(() => {
  nowMs = 1_000;
  pod = new PodLoad(() => nowMs);
  load();
});
const load = () => pod.load(0, () => tokensPerS);
const send = (more: Partial<Share> = {}) => pod.send({ ...share, ...more }, nowMs, () => {});
/** A scrape that begins and ends now. */
const scraped = (more: Partial<Scrape> = {}): void => pod.scraped({ ...idle, ...more }, nowMs, pod.open, nowMs);
function counts(): number[] {
  const { waiting, running, tokensAhead } = load();
  return [waiting, running, tokensAhead];
}

describe('a request whose first token nobody tells', () => {
  it('runs once a scrape that began after it was sent saw nobody wait, and its prompt has had its time', () => {
    const sent = send();
    pod.scraped({ ...idle, running: 1 }, nowMs, 0, nowMs + 10); // begun too early to see it
    nowMs += 2_000;
    expect(counts()).toEqual([1, 0, 2_000]);
    scraped({ running: 1 });
    expect(counts()).toEqual([0, 1, 0]);
    // Its answer comes as a whole, and counts no second time.
    sent.firstToken();
    expect(counts()).toEqual([0, 1, 0]);
    sent.ended();
    expect([...counts(), pod.open]).toEqual([0, 0, 0, 0]);
  });

  it('is not taken for begun while scrapes alone have passed', () => {
    send();
    nowMs += 1;
    scraped({ running: 1 });
    nowMs += 198;
    expect(counts()).toEqual([1, 0, 2_000]);
    nowMs += 1;
    expect(counts()).toEqual([0, 1, 0]);
  });

  it('has its time behind those before it, and none that passed before it was sent', () => {
    nowMs += 5_000;
    for (let i = 0; i < 3; i++) send();
    nowMs += 1;
    scraped({ running: 3 });
    const begun: number[] = [];
    for (let ms = 0; ms <= 600; ms += 100, nowMs += 100) begun.push(counts()[1]!);
    expect(begun).toEqual([0, 0, 1, 1, 2, 2, 3]);
  });

  it('has none while somebody waits there: it may be the one', () => {
    send();
    for (let i = 0; i < 8; i++) {
      nowMs += 250;
      scraped({ running: 4, waiting: 1 });
    }
    expect(load().tokensAhead).toBe(2_000);
    nowMs += 100;
    scraped({ running: 5 });
    expect(load().tokensAhead).toBe(2_000);
    nowMs += 100;
    expect(load().tokensAhead).toBe(0);
  });

  it('still says how fast its pod is, where its first token is told after all', () => {
    for (let i = 0; i < 3; i++) {
      scraped();
      nowMs += 1;
      const sent = send();
      nowMs += 1;
      scraped({ running: 1 });
      nowMs += 999;
      expect(counts()).toEqual([0, 1, 0]);
      sent.firstToken(true);
      sent.ended();
    }
    expect(pod.prefillTokensPerS).toBeCloseTo(2_000);
  });
});

it('one whose first token is told waits for it', () => {
  const sent = send({ tellsFirstToken: true });
  for (let i = 0; i < 8; i++) {
    nowMs += 250;
    scraped({ running: 1 });
  }
  expect(counts()).toEqual([1, 0, 2_000]);
  sent.firstToken(true);
  expect(counts()).toEqual([0, 1, 0]);
});

it('each is counted once, whatever is told of it and when; who told everything is counted exactly', () => {
  const steps = fc.array(
    fc.oneof(
      fc.record({
        what: fc.constant('send' as const),
        tokens: fc.integer({ min: 1, max: 5_000 }),
        tells: fc.boolean(),
      }),
      fc.record({ what: fc.constantFrom('first' as const, 'end' as const), at: fc.nat(20) }),
      fc.record({ what: fc.constant('scrape' as const), waiting: fc.nat(2) }),
      fc.record({ what: fc.constant('pass' as const), ms: fc.nat(400) }),
    ),
    { maxLength: 60 },
  );
  fc.assert(
    fc.property(steps, (all) => {
      nowMs = 1_000;
      pod = new PodLoad(() => nowMs);
      const open: { tokens: number; tells: boolean; first: boolean; sent: ReturnType<typeof send> }[] = [];
      for (const step of all) {
        const before = load().tokensAhead;
        if (step.what === 'send') {
          const { tokens, tells } = step;
          open.push({ tokens, tells, first: false, sent: send({ tokensAhead: tokens, tellsFirstToken: tells }) });
        } else if (step.what === 'scrape') scraped({ waiting: Math.min(step.waiting, open.length) });
        else if (step.what === 'pass') nowMs += step.ms;
        else if (open.length > 0) {
          const at = step.at % open.length;
          const one = open[at]!;
          one.first = true;
          if (step.what === 'first') one.sent.firstToken();
          else open.splice(at, 1)[0]!.sent.ended();
        }
        const { waiting, running, tokensAhead } = load();
        expect(waiting + running).toBe(open.length);
        const sum = (of: typeof open): number => of.reduce((total, { tokens }) => total + tokens, 0);
        const waits = open.filter(({ first }) => !first);
        expect(tokensAhead).toBeLessThanOrEqual(sum(waits));
        expect(tokensAhead).toBeGreaterThanOrEqual(sum(waits.filter(({ tells }) => tells)));
        if (step.what !== 'send') expect(tokensAhead).toBeLessThanOrEqual(before);
        expect(waiting).toBeLessThanOrEqual(waits.length);
      }
      for (const { sent } of open) sent.ended();
      expect([...counts(), pod.open]).toEqual([0, 0, 0, 0]);
    }),
  );
});

describe('the steps of a pod', () => {
  let counted: { intervals: number; intervalS: number; running: number };
  beforeEach(() => {
    counted = { intervals: 0, intervalS: 0, running: 0 };
  });
  /** Between two scrapes it gives a hundred tokens of each stream, in steps of 10 ms and 1 ms more a stream. */
  function gives(streams: number, of = pod): void {
    counted = {
      intervals: counted.intervals + 100 * streams,
      intervalS: counted.intervalS + 100 * streams * (0.01 + 0.001 * streams),
      running: streams,
    };
    nowMs += 250;
    of.scraped({ ...idle, ...counted }, nowMs, 0, nowMs);
  }
  const steps = (): number[] => [load().stepS, load().stepPerRequestS];

  it('with as many streams always are as long as they were, and nothing is known of more', () => {
    for (let i = 0; i < 40; i++) gives(16);
    const [stepS, perRequestS] = steps();
    expect([stepS, perRequestS]).toEqual([expect.closeTo(0.026, 6), 0]);
  });

  it('with more streams and fewer are a line, which stays when they are as many again', () => {
    for (let i = 0; i < 40; i++) for (let times = 0; times < 4; times++) gives(i % 2 === 0 ? 8 : 16);
    expect(steps()[1]).toBeGreaterThan(0.0009);
    expect(steps()[1]).toBeLessThan(0.0012);
    for (let i = 0; i < 5_000; i++) gives(16);
    const [stepS, perRequestS] = steps();
    expect(perRequestS).toBeGreaterThan(0.0009);
    expect(stepS! + 16 * perRequestS!).toBeCloseTo(0.026, 4);
  });

  it('are forgotten with the life of its process', () => {
    for (let i = 0; i < 40; i++) gives(8 + (i % 9));
    expect(steps()[1]).toBeGreaterThan(0);
    pod.scraped({ ...idle, startedAt: '2' }, nowMs, 0, nowMs);
    expect(steps()).toEqual([0, 0]);
  });
});
