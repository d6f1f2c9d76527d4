/** A full disk tier with a time to live keeps what it holds in memory, and nothing of what has passed through it. */
import { expect, it } from 'vitest';
import { runChurn } from './churn.ts';

it('half an hour of churn leaves memory flat, and what is left ends at its time', async () => {
  const said: string[] = [];
  expect(await runChurn(10_000, 0.02, (text) => said.push(text)), said.join('')).toBe(0);
  expect(said.at(-1)).toMatch(/memory is flat, and all ended at their time/);
});
