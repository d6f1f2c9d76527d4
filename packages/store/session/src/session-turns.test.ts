import { expect, it } from 'vitest';
import { SessionTurns } from './session-turns.ts';

/** Sessions that ask so many requests of 4 ms each, at once; which of them were answered in each turn of the event loop. */
async function answered(wanted: Readonly<Record<string, number>>, turnMs: number): Promise<string[]> {
  let nowUs = 0;
  const turns = new SessionTurns({ nowUs: () => nowUs, wallMs: () => 0, after: () => () => {} }, turnMs);
  const out: string[] = [];
  let now: string[] | undefined;
  const answer = (name: string): void => {
    if (now === undefined) {
      now = [];
      setImmediate(() => {
        out.push(now!.join(''));
        now = undefined;
      });
    }
    now.push(name);
    nowUs += 4_000;
  };
  let open = 0;
  const session = (name: string, count: number): void => {
    let left = count;
    const run = (): void => {
      while (left > 0 && turns.hasTime) {
        answer(name);
        if (--left === 0) open--;
      }
      if (left > 0) turns.later(run);
    };
    open++;
    run();
  };
  for (const [name, count] of Object.entries(wanted)) session(name, count);
  while (open > 0 || now !== undefined) await new Promise(setImmediate);
  return out;
}

it('sessions share the time of a turn, and who is not done comes behind the others', async () => {
  expect(await answered({ a: 7, b: 2, c: 1 }, 10)).toEqual(['aaa', 'aaa', 'bbc', 'a']);
});

it('a request that takes longer than a turn has is one turn, and none is passed over', async () => {
  expect(await answered({ a: 3, b: 1 }, 1)).toEqual(['a', 'a', 'b', 'a']);
});

it('who is forgotten is not called', async () => {
  const turns = new SessionTurns({ nowUs: () => 0, wallMs: () => 0, after: () => () => {} }, 10);
  const called: string[] = [];
  const first = (): void => void called.push('first');
  turns.later(first);
  turns.later(() => called.push('second'));
  turns.forget(first);
  await new Promise(setImmediate);
  expect(called).toEqual(['second']);
});
