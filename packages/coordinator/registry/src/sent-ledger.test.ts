/** What was sent and what the worker says, against one who knows all: never twice, never not at all, nothing at rest. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { type Entry, SentLedger } from './sent-ledger.ts';

interface NaiveRequest {
  readonly number: number;
  readonly entry: Entry;
  readonly tokens: number;
  /** At the worker: not there yet, there, ended. */
  at: 'way' | 'worker' | 'done';
  begun: boolean;
  /** The coordinator knows of its end. */
  ended: boolean;
}

/** A word of the worker's load: the requests it counts, and those that it names for the first time. */
interface Word {
  readonly counts: ReadonlySet<number>;
  readonly taken: readonly number[];
}

const action = fc.constantFrom('send', 'arrive', 'begin', 'finish', 'end', 'fail', 'tell', 'hear', 'reconnect');

it('is exact whatever order requests, answers and words of the load come in', () => {
  let met = 0;
  fc.assert(
    fc.property(
      fc.array(fc.tuple(action, fc.nat(50), fc.nat(1_000)), { minLength: 40, maxLength: 300, size: 'max' }),
      (actions) => {
        const ledger = new SentLedger();
        const requests: NaiveRequest[] = [];
        let stream: Word[] = [];
        let untold: number[] = [];
        let heard: ReadonlySet<number> = new Set();
        const here = (): number[] => requests.filter(({ at }) => at === 'worker').map(({ number }) => number);
        const pick = (which: number, fits: (one: NaiveRequest) => boolean): NaiveRequest | undefined => {
          const fitting = requests.filter(fits);
          return fitting[which % Math.max(1, fitting.length)];
        };
        const end = (one: NaiveRequest | undefined): void => {
          if (!one) return;
          one.ended = true;
          ledger.ended(one.entry);
        };
        const does: Record<string, (which: number, tokens: number) => void> = {
          send: (_, tokens) => {
            const requestId = `r${requests.length}`;
            const entry = ledger.send({ requestId, tokensAhead: tokens, blocks: tokens * 2, loadS: tokens / 8 });
            expect(ledger.numberOf(requestId)).toBe(entry.number);
            requests.push({ number: entry.number, entry, tokens, at: 'way', begun: false, ended: false });
          },
          arrive: (which) => {
            const one = pick(which, ({ at }) => at === 'way');
            if (!one) return;
            one.at = 'worker';
            untold.push(one.number);
          },
          begin: (which) => {
            const one = pick(which, ({ at, begun, ended }) => at === 'worker' && !begun && !ended);
            if (!one) return;
            one.begun = true;
            ledger.begun(one.entry);
          },
          finish: (which) => {
            const one = pick(which, ({ at }) => at === 'worker');
            if (one) one.at = 'done';
          },
          end: (which) => end(pick(which, ({ at, ended }) => at === 'done' && !ended)),
          // The client left, or the call broke: it may still be on its way, or at work there.
          fail: (which) => end(pick(which, ({ ended }) => !ended)),
          tell: () => {
            stream.push({ counts: new Set(here()), taken: untold });
            untold = [];
          },
          hear: () => {
            const word = stream.shift();
            if (!word) return;
            for (const number of word.taken) ledger.taken(number);
            heard = word.counts;
          },
          // What was on its way is lost; the new stream begins with all that the worker has.
          reconnect: () => {
            stream = [];
            untold = here();
          },
        };
        for (const [name, which, tokens] of actions) {
          does[name]!(which, tokens);
          const counted = requests.filter(({ entry }) => entry.counts !== undefined);
          for (const one of requests) {
            const isCounted = one.entry.counts !== undefined;
            expect(isCounted && heard.has(one.number), 'counted here and by the worker').toBe(false);
            if (one.ended) expect(isCounted, 'counted after its end').toBe(false);
            // In neither sum only when the worker has ended it.
            else if (!isCounted && !heard.has(one.number)) expect(one.at).toBe('done');
          }
          const waiting = counted.filter(({ begun }) => !begun);
          expect(ledger.waiting).toBe(waiting.length);
          expect(ledger.running).toBe(counted.length - waiting.length);
          expect(ledger.tokensAhead).toBe(waiting.reduce((sum, { tokens: one }) => sum + one, 0));
          expect(ledger.blocks).toBe(counted.reduce((sum, { tokens: one }) => sum + one * 2, 0));
          expect(ledger.loadAheadS).toBe(waiting.reduce((sum, { tokens: one }) => sum + one * 125_000, 0) / 1e6);
          met += counted.length;
        }
        for (const one of requests) if (!one.ended) end(one);
        expect([
          ledger.open,
          ledger.waiting,
          ledger.running,
          ledger.tokensAhead,
          ledger.blocks,
          ledger.loadAheadS,
        ]).toEqual([0, 0, 0, 0, 0, 0]);
      },
    ),
  );
  expect(met).toBeGreaterThan(1_000);
});

it('one without a name counts until its first token', () => {
  const ledger = new SentLedger();
  const entry = ledger.send({ tokensAhead: 10, blocks: 2, loadS: 0 });
  expect([ledger.waiting, ledger.running, ledger.blocks]).toEqual([1, 0, 2]);
  ledger.begun(entry);
  ledger.begun(entry);
  expect([ledger.waiting, ledger.running, ledger.blocks, ledger.open]).toEqual([0, 0, 0, 1]);
  ledger.ended(entry);
  expect(ledger.open).toBe(0);
});

it('an estimate that cannot be counts nothing', () => {
  const ledger = new SentLedger();
  for (const value of [Number.NaN, -5, Number.POSITIVE_INFINITY])
    ledger.send({ tokensAhead: value, blocks: value, loadS: value });
  expect([ledger.waiting, ledger.tokensAhead, ledger.blocks, ledger.loadAheadS]).toEqual([3, 0, 0, 0]);
});

it('two requests of one name are two', () => {
  const ledger = new SentLedger();
  const share = { requestId: 'same', tokensAhead: 1, blocks: 1, loadS: 0 };
  const [first, second] = [ledger.send(share), ledger.send(share)];
  ledger.ended(first);
  expect(ledger.numberOf('same')).toBe(second.number);
  ledger.ended(second);
  expect(ledger.numberOf('same')).toBeUndefined();
});
