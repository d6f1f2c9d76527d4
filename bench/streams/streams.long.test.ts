/** The bench itself, small: all three ways give every token, and none gives an error. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { expect, it, onTestFinished } from 'vitest';
import { streamsCost } from './streams.ts';

it('answers come whole, asked straight, through a bare proxy and through a coordinator', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-streams-'));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  const size = {
    clients: 16,
    engines: 2,
    tokensPerS: 20,
    answerTokens: 16,
    promptTokens: 16,
    seconds: 2,
    isApart: false,
  };
  const { straight, proxied, through } = await streamsCost({ folder, ...size }, () => {});
  expect([straight.errors, proxied.errors, through.errors]).toEqual([{}, {}, {}]);
  for (const { tokens, answers } of [straight, proxied, through]) {
    expect(answers).toBeGreaterThan(0);
    expect(tokens).toBeGreaterThan(answers);
  }
});
