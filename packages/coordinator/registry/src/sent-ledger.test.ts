/** What was sent and what the worker says, against one who knows all: never twice, never not at all, nothing at rest. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { type Entry, type Names, SentLedger } from './sent-ledger.ts';

interface NaiveRequest {
  readonly number: number;
  readonly entry: Entry;
  readonly tokens: number;
  at: 'way' | 'waiting' | 'running' | 'done';
  /** Its events that the coordinator has still to hear, in order. */
  events: ('token' | 'last')[];
  hasToken: boolean;
  isOver: boolean;
  isOpen: boolean;
}

/** A word of the worker's load: how it counts each request, and those that it names for the first time. */
interface Word {
  readonly counts: ReadonlyMap<number, 'waiting' | 'running'>;
  readonly names: Names;
  readonly isFirst: boolean;
}

const noNames = () => ({ taken: [] as number[], begun: [] as number[], ended: [] as number[] });
/** Most of them by ends and words, where all mistakes are. */
const action = fc.constantFrom(
  ...[
    'send',
    'send',
    'arrive',
    'arrive',
    'begin',
    'begin',
    'finish',
    'finish',
    'event',
    'event',
    'event',
    'end',
    'end',
  ],
  ...['fail', 'tell', 'tell', 'tell', 'hear', 'hear', 'hear', 'reconnect', 'restart'],
);

it('is exact whatever order requests, their events and words of the load come in', () => {
  let [met, below] = [0, 0];
  fc.assert(
    fc.property(
      fc.array(fc.tuple(action, fc.nat(50), fc.nat(1_000)), { minLength: 40, maxLength: 300, size: 'max' }),
      (actions) => {
        const ledger = new SentLedger();
        const requests: NaiveRequest[] = [];
        let stream: Word[] = [];
        let untold = noNames();
        let isNew = true;
        let heard: Word['counts'] = new Map();
        const endHeard = new Set<number>();
        const there = (): NaiveRequest[] => requests.filter(({ at }) => at === 'waiting' || at === 'running');
        const pick = (which: number, fits: (one: NaiveRequest) => boolean): NaiveRequest | undefined => {
          const fitting = requests.filter(fits);
          return fitting[which % Math.max(1, fitting.length)];
        };
        const end = (one: NaiveRequest | undefined): void => {
          if (!one) return;
          one.isOpen = false;
          // Of one that the worker has not named, nothing is known from now on.
          if (!one.isOver && !heard.has(one.number)) one.hasToken = false;
          ledger.ended(one.entry);
        };
        const anew = (): void => {
          stream = [];
          untold = noNames();
          untold.taken = there().map(({ number }) => number);
          untold.begun = requests.filter(({ at }) => at === 'running').map(({ number }) => number);
          isNew = true;
        };
        const does: Record<string, (which: number, tokens: number) => void> = {
          send: (_, tokens) => {
            const requestId = `r${requests.length}`;
            const entry = ledger.send({ requestId, tokensAhead: tokens, blocks: tokens * 2, loadS: tokens / 8 });
            expect(ledger.numberOf(requestId)).toBe(entry.number);
            const { number } = entry;
            requests.push({
              ...{ number, entry, tokens, at: 'way', events: [], hasToken: false, isOver: false, isOpen: true },
            });
          },
          arrive: (which) => {
            const one = pick(which, ({ at }) => at === 'way');
            if (!one) return;
            one.at = 'waiting';
            untold.taken.push(one.number);
          },
          begin: (which) => {
            const one = pick(which, ({ at }) => at === 'waiting');
            if (!one) return;
            one.at = 'running';
            one.events.push('token');
            untold.begun.push(one.number);
          },
          // Of a prompt that was for another worker, it ends without a token.
          finish: (which) => {
            const one = pick(which, ({ at }) => at === 'waiting' || at === 'running');
            if (!one) return;
            one.at = 'done';
            one.events.push('last');
            untold.ended.push(one.number);
          },
          event: (which) => {
            const one = pick(which, ({ events, isOpen }) => isOpen && events.length > 0);
            if (one?.events.shift() === 'token') {
              one.hasToken = true;
              ledger.begun(one.entry);
            } else if (one) {
              one.isOver = true;
              ledger.over(one.number);
            }
          },
          end: (which) => end(pick(which, ({ isOver, isOpen }) => isOver && isOpen)),
          // The client left, or the call broke: it may still be on its way, or at work there.
          fail: (which) => end(pick(which, ({ isOpen }) => isOpen)),
          tell: () => {
            const counts = new Map(there().map(({ number, at }) => [number, at as 'waiting' | 'running']));
            stream.push({ counts, names: untold, isFirst: isNew });
            untold = noNames();
            isNew = false;
          },
          hear: () => {
            const word = stream.shift();
            if (!word) return;
            ledger.hear(word.names, word.isFirst);
            if (word.isFirst) for (const one of requests) if (!one.isOpen) one.hasToken = false;
            for (const number of word.names.ended) endHeard.add(number);
            heard = word.counts;
          },
          // What was on its way is lost; the new stream begins with all that the worker has.
          reconnect: anew,
          restart: () => {
            for (const one of there()) {
              one.at = 'done';
              one.events = [];
            }
            anew();
          },
        };
        const check = (): void => {
          let [waiting, running, tokensAhead, blocks] = [0, 0, 0, 0];
          for (const { number, tokens, hasToken, isOver, isOpen } of requests) {
            const told = heard.get(number);
            const isThere = !isOver && (told !== undefined || (isOpen && !endHeard.has(number)));
            const runs = isThere && (hasToken || told === 'running');
            const waits = isThere && !runs;
            waiting += Number(waits) - Number(told === 'waiting');
            running += Number(runs) - Number(told === 'running');
            if (waits && told === undefined) tokensAhead += tokens;
            if (isThere && told === undefined) blocks += 2 * tokens;
            met += Number(isThere);
          }
          below += Number(running < 0);
          expect([ledger.waiting, ledger.running, ledger.tokensAhead, ledger.blocks]).toEqual([
            ...[waiting, running, tokensAhead, blocks],
          ]);
          expect(ledger.loadAheadS).toBe((tokensAhead * 125_000) / 1e6);
          expect(ledger.open).toBe(requests.filter(({ isOpen }) => isOpen).length);
        };
        for (const [name, which, tokens] of actions) {
          does[name]!(which, tokens);
          check();
        }
        for (const one of requests) {
          if (one.isOpen) end(one);
          if (one.at !== 'done')
            does.finish!(requests.filter(({ at }) => at === 'waiting' || at === 'running').indexOf(one), 0);
        }
        does.tell!(0, 0);
        while (stream.length > 0) does.hear!(0, 0);
        check();
        // Those that the last stream has not named are forgotten a little later.
        for (let word = 0; word < 65; word++) ledger.hear(noNames(), false);
        const { open, left } = ledger;
        expect([open, left, ledger.waiting, ledger.running, ledger.blocks, ledger.loadAheadS]).toEqual([
          0, 0, 0, 0, 0, 0,
        ]);
      },
    ),
  );
  // Of 100 lives, each a chance of its own: how many cases there are is another number each time.
  expect(met).toBeGreaterThan(0);
  expect(below).toBeGreaterThan(0);
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

it('a worker that names no ends is believed again', () => {
  const ledger = new SentLedger();
  const entry = ledger.send({ requestId: 'one', tokensAhead: 1, blocks: 1, loadS: 0 });
  ledger.hear({ taken: [entry.number], begun: [entry.number], ended: [] }, true);
  ledger.over(entry.number);
  ledger.ended(entry);
  expect([ledger.running, ledger.left]).toEqual([-1, 1]);
  for (let word = 1; word < 64; word++) ledger.hear({ taken: [], begun: [], ended: [] }, false);
  expect([ledger.running, ledger.left]).toEqual([-1, 1]);
  ledger.hear({ taken: [], begun: [], ended: [] }, false);
  expect([ledger.running, ledger.left]).toEqual([0, 0]);
});
