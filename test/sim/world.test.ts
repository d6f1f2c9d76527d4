import { native } from '@kvtier/data-plane';
import { expect, it } from 'vitest';
import { Violation, World } from './world.ts';

/** Computes for so long. */
function spin(cpuMs: number): void {
  const end = native.threadCpuMs() + cpuMs;
  while (native.threadCpuMs() < end);
}

it('a node that takes more than 50 ms for one thing breaks a law, with the promises that it goes on with; a server does not', async () => {
  const world = new World(1);
  const node = { name: 'node', alive: true };
  world.schedule(1, 'short', () => spin(20), node);
  world.schedule(2, 'of the world', () => spin(60));
  world.schedule(3, 'long', () => void Promise.resolve().then(() => spin(60)), node);
  await world.step();
  await world.step();
  expect(world.longestTurnMs).toBeGreaterThanOrEqual(20);
  const failure = await world.step().catch((error: unknown) => error);
  expect(failure).toBeInstanceOf(Violation);
  expect((failure as Violation).message).toMatch(/^law 2: node: long: a turn of 6\d ms, 50 allowed$/);
});
