/** That streams which stand still are refused: one that an engine, asked straight or by a coordinator, never ends. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, expect, it, onTestFinished, vi } from 'vitest';
import { streamsCost } from './streams.ts';

afterEach(() => {
  vi.unstubAllEnvs();
});

it.each([
  ['asked straight', 'generate'],
  ['through the coordinator', 'generateMany'],
])('an answer that stands still, %s', async (way, hangsBy) => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-streams-'));
  onTestFinished(() => rmSync(folder, { recursive: true, force: true }));
  vi.stubEnv('KVTIER_BENCH_HANGS', hangsBy);
  const size = {
    clients: 12,
    engines: 2,
    tokensPerS: 20,
    answerTokens: 8,
    promptTokens: 16,
    seconds: 3,
    isApart: false,
  };
  const told: string[] = [];
  const run = streamsCost({ folder, ...size }, (line) => told.push(line));
  await expect(run).rejects.toMatchObject({
    code: 'IO',
    message: `bench streams, ${way}: of 12 answers 1 stood still at the end, for 2.5 s and longer`,
  });
  const { gaps } = JSON.parse(told.at(-2)!.slice(told.at(-2)!.indexOf('{'))) as { gaps: { p999: number } };
  expect(gaps.p999).toBeGreaterThanOrEqual(1_999.9); // the most that is counted
});
