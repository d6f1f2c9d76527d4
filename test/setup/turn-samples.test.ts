import { expect, it } from 'vitest';
import { takeSamples } from './turn-samples.ts';

function spend(ms: number): void {
  const from = process.cpuUsage();
  for (;;) {
    const { user, system } = process.cpuUsage(from);
    if (user + system > ms * 1_000) return;
  }
}
const work = {
  first: (): void => spend(60),
  second: (): void => spend(60),
};

/** Of which of them there are samples: the last one or two that were taken come with the next profile. */
function told(): string[] {
  const { nodes, samples } = takeSamples();
  const isBelow = new Map<number, string>();
  for (const { id, callFrame, children } of nodes) {
    const name = callFrame.functionName in work ? callFrame.functionName : isBelow.get(id);
    if (name !== undefined) for (const one of [id, ...(children ?? [])]) isBelow.set(one, name);
  }
  return Object.keys(work).filter((name) => samples.filter((id) => isBelow.get(id) === name).length > 3);
}

it('each profile has what ran since the one before, none is without', () => {
  takeSamples();
  work.first();
  expect(told()).toEqual(['first']);
  work.second();
  expect(told()).toEqual(['second']);
  work.first();
  work.second();
  expect(told()).toEqual(['first', 'second']);
  expect(told()).toEqual([]);
});
