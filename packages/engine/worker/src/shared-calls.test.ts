/** Calls that carry many requests, over a scripted call: what goes out by which message, and what is left over. */
import { EventEmitter } from 'node:events';
import { KvError } from '@kvtier/errors';
import { fromStatus, type GenerateEvent, type GenerateEvents, type GenerateRequest } from '@kvtier/wire/grpc';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import type { TellEvent } from './generations.ts';
import { type ManyCall, SharedCalls } from './shared-calls.ts';

const event = (fields: Partial<GenerateEvent>): GenerateEvent => ({
  ...{ tokenIds: [], finishReason: '', cache: undefined, failure: undefined },
  ...fields,
});
const cache = { promptTokens: 1, cachedTokens: 0, tokensByTier: {}, queueUs: 0, loadUs: 0, prefillUs: 0 };
const begin = { requestId: 'r', promptTokenIds: [1] } as unknown as GenerateRequest;
const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

/** A call whose other end reads as it is told to. */
class ScriptedCall extends EventEmitter {
  /** As they were when they were written. */
  readonly messages: GenerateEvents[] = [];
  /** Whether there is room behind the next message. */
  roomy = true;
  ended = false;
  failure: KvError | undefined;

  write(events: GenerateEvents): boolean {
    expect(this.ended || this.failure !== undefined).toBe(false);
    this.messages.push(structuredClone(events));
    return this.roomy;
  }

  end(): void {
    expect(this.ended).toBe(false);
    this.ended = true;
  }

  override emit(name: string, ...args: unknown[]): boolean {
    if (name !== 'error') return super.emit(name, ...args);
    this.failure = fromStatus(args[0]);
    return true;
  }

  /** Tokens and end of each request, in order. */
  told(): Map<number, string> {
    const told = new Map<number, string>();
    for (const { events } of this.messages) {
      for (const { number, event: each } of events) {
        const { tokenIds, finishReason, cache: use, failure } = each!;
        const words = [...(use ? ['cache'] : []), ...tokenIds, ...(failure ? [failure.code] : []), finishReason];
        told.set(number, [told.get(number) ?? '', ...words].filter((word) => word !== '').join(' '));
      }
    }
    return told;
  }
}

/** The scheduler, as far as a call sees it. */
class Requests {
  readonly tells: TellEvent[] = [];
  readonly aborted: number[] = [];
  refusal: KvError | undefined;

  begin = (_request: GenerateRequest, tell: TellEvent): (() => void) => {
    const which = this.tells.push(tell) - 1;
    if (this.refusal) tell(event({ failure: { code: this.refusal.code, message: '', retry: false } as never }), true);
    return () => this.aborted.push(which);
  };
}

function open(): { call: ScriptedCall; requests: Requests; calls: SharedCalls } {
  const [call, requests, calls] = [new ScriptedCall(), new Requests(), new SharedCalls()];
  calls.add(call as unknown as ManyCall, requests);
  return { call, requests, calls };
}

it('what a turn has for all requests is one message, in the order in which it was told', async () => {
  const { call, requests } = open();
  for (const number of [1, 2, 7]) call.emit('data', { number, begin });
  for (const [at, tell] of requests.tells.entries()) tell(event({ tokenIds: [at], cache }), false);
  expect(call.messages).toEqual([]);
  await turn();
  expect(call.messages).toHaveLength(1);
  expect(call.messages[0]!.events.map(({ number }) => number)).toEqual([1, 2, 7]);
  requests.tells[1]!(event({ tokenIds: [9], finishReason: 'stop' }), true);
  await turn();
  expect(call.messages).toHaveLength(2);
  expect(call.told()).toEqual(
    new Map([
      [1, 'cache 0'],
      [2, 'cache 1 9 stop'],
      [7, 'cache 2'],
    ]),
  );
});

it('a call that is not read keeps each token once: those of a request join, and follow when it is read again', async () => {
  const { call, requests } = open();
  call.emit('data', { number: 1, begin });
  call.emit('data', { number: 2, begin });
  const [one, two] = requests.tells as [TellEvent, TellEvent];
  call.roomy = false;
  one(event({ tokenIds: [0], cache }), false);
  await turn();
  for (let token = 1; token <= 1_000; token++) {
    one(event({ tokenIds: [token] }), false);
    two(event({ tokenIds: [token] }), token === 1_000);
    await Promise.resolve();
  }
  expect(call.messages).toHaveLength(1);
  call.roomy = true;
  call.emit('drain');
  expect(call.messages).toHaveLength(2);
  const [first, second, ...more] = call.messages[1]!.events;
  expect(more).toEqual([]);
  const tokens = Array.from({ length: 1_000 }, (_, i) => i + 1);
  expect([first!.event!.tokenIds, second!.event!.tokenIds]).toEqual([tokens, tokens]);
});

it('a request that is not wanted any more is aborted, and no other', async () => {
  const { call, requests } = open();
  for (const number of [1, 2, 3]) call.emit('data', { number, begin });
  call.emit('data', { number: 2 });
  call.emit('data', { number: 2 });
  call.emit('data', { number: 99 });
  expect(requests.aborted).toEqual([1]);
  call.emit('cancelled');
  expect(requests.aborted).toEqual([1, 0, 2]);
  // Nothing is written to a call that is gone.
  requests.tells[0]!(event({ tokenIds: [1] }), false);
  call.emit('data', { number: 4, begin });
  await turn();
  expect(call.messages).toEqual([]);
  expect(requests.tells).toHaveLength(3);
});

it('numbers that do not grow end the call with one line, and abort what it has', () => {
  const { call, requests } = open();
  call.emit('data', { number: 5, begin });
  call.emit('data', { number: 5, begin });
  expect(call.failure).toMatchObject({
    code: 'PROTOCOL',
    message: expect.stringContaining('request 5 begins after 5'),
  });
  expect(requests.aborted).toEqual([0]);
});

it('what is refused at once is told as its end', async () => {
  const { call, requests } = open();
  requests.refusal = new KvError('BUSY', 'full');
  call.emit('data', { number: 1, begin });
  await turn();
  expect(call.told()).toEqual(new Map([[1, 'BUSY']]));
  call.emit('cancelled');
  expect(requests.aborted).toEqual([]);
});

it('at the worker’s end a call ends when its last request has, one without any at once', async () => {
  const { call, requests, calls } = open();
  const idle = new ScriptedCall();
  calls.add(idle as unknown as ManyCall, requests);
  call.emit('data', { number: 1, begin });
  calls.close();
  expect([call.ended, idle.ended]).toEqual([false, true]);
  requests.tells[0]!(event({ tokenIds: [3], finishReason: 'length' }), true);
  await turn();
  expect(call.told()).toEqual(new Map([[1, '3 length']]));
  expect(call.ended).toBe(true);
});

const step = fc.oneof(
  { weight: 3, arbitrary: fc.record({ kind: fc.constant('begin' as const) }) },
  { weight: 8, arbitrary: fc.record({ kind: fc.constant('token' as const), which: fc.nat(), turn: fc.boolean() }) },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('end' as const), which: fc.nat() }) },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('leave' as const), which: fc.nat() }) },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('full' as const) }) },
  { weight: 2, arbitrary: fc.record({ kind: fc.constant('drain' as const) }) },
);

it('whatever the order of things, each request is told its own tokens, all of them unless it left, and nothing is left over', async () => {
  await fc.assert(
    fc.asyncProperty(fc.array(step, { maxLength: 120 }), async (steps) => {
      const { call, requests, calls } = open();
      const said: string[] = [];
      const open_ = new Set<number>();
      const left = new Set<number>();
      const pick = (which: number): number | undefined => [...open_][which % Math.max(1, open_.size)];
      const say = (at: number, tokenIds: number[], isLast: boolean): void => {
        requests.tells[at]!(event({ tokenIds, finishReason: isLast ? 'stop' : '' }), isLast);
        said[at] = [said[at] ?? '', ...tokenIds, isLast ? 'stop' : ''].filter((word) => word !== '').join(' ');
        if (isLast) open_.delete(at);
      };
      let token = 0;
      for (const each of steps) {
        const at = 'which' in each ? pick(each.which) : undefined;
        if (each.kind === 'begin') {
          open_.add(requests.tells.length);
          call.emit('data', { number: requests.tells.length + 1, begin });
        } else if (each.kind === 'full') call.roomy = false;
        else if (each.kind === 'drain') {
          call.roomy = true;
          call.emit('drain');
        } else if (at === undefined) continue;
        else if (each.kind === 'leave') {
          call.emit('data', { number: at + 1 });
          open_.delete(at);
          left.add(at);
        } else say(at, [token++], each.kind === 'end');
        if (each.kind === 'token' && each.turn) await Promise.resolve();
      }
      call.roomy = true;
      call.emit('drain');
      for (const at of [...open_]) say(at, [token++], true);
      calls.close();
      await turn();
      expect(call.ended).toBe(true);
      expect(requests.aborted).toEqual([...left]);
      const told = call.told();
      said.forEach((words, at) => {
        expect(told.get(at + 1) ?? '').toBe(words);
      });
    }),
    { numRuns: 200 },
  );
});
