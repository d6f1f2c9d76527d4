/** When a look at all workers is made. */
import { beforeEach, expect, it } from 'vitest';
import { LateLook } from './late-look.ts';

const turn = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));
const listeners = new Set<() => void>();
const workers = {
  onChange: (listener: () => void) => {
    listeners.add(listener);
    return () => void listeners.delete(listener);
  },
};
const change = (): void => {
  for (const listener of listeners) listener();
};
let looks: number;
let look: LateLook;
beforeEach(() => {
  listeners.clear();
  looks = 0;
  look = new LateLook(workers, () => looks++);
});

it('once for all that changes in a turn, in a later one', async () => {
  for (let round = 1; round <= 2; round++) {
    for (let i = 0; i < 100; i++) change();
    expect(looks).toBe(round - 1);
    await turn();
    expect(looks).toBe(round);
  }
  await turn();
  expect(looks).toBe(2);
});

it('when somebody asks, once, and only where something has changed', async () => {
  look.now();
  expect(looks).toBe(0);
  change();
  look.now();
  look.now();
  expect(looks).toBe(1);
  await turn();
  expect(looks).toBe(1);
});

it('never after its end', async () => {
  change();
  look.close();
  expect(listeners.size).toBe(0);
  look.now();
  await turn();
  expect(looks).toBe(0);
});
