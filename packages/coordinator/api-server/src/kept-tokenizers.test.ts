/** Which tokenizers a thread keeps, and what it is told when they do not all fit. */
import { expect, it, vi } from 'vitest';
import { rereadTold } from './api-server.ts';
import { KeptTokenizers, keptBytesOf } from './kept-tokenizers.ts';
import { RequestMetrics } from './metrics.ts';
import { modelDir, silent } from './testing/harness.ts';
import { loadTokenizer } from './tokenizer.ts';

const MiB = 2 ** 20;
/** Asks for the tokenizers of these loads in turn. Says which were read, and which of them anew for want of room. */
function ask(maxBytes: number, heldBytes: number, generations: readonly number[]): [number[], number[]] {
  const kept = new KeptTokenizers<{ heldBytes: number }>(maxBytes);
  const [read, anew]: [number[], number[]] = [[], []];
  for (const generation of generations) {
    const load = () => {
      read.push(generation);
      return { heldBytes };
    };
    kept.get(generation, load, () => anew.push(generation));
  }
  return [read, anew];
}
const inTurn = (models: number): number[] => Array.from({ length: 3 * models }, (_, at) => at % models);

it('of as many models as there are, each is read once', () => {
  expect(ask(keptBytesOf(1_024), MiB, inTurn(64))).toEqual([[...Array(64).keys()], []]);
  // Of 128,000 tokens each.
  expect(ask(keptBytesOf(1_024), 120 * MiB, inTurn(4))).toEqual([[0, 1, 2, 3], []]);
});

it('where they do not fit, the one used longest ago goes, and who reads it anew is told', () => {
  expect(ask(2 * MiB, MiB, [0, 1, 0, 2, 0, 1])).toEqual([[0, 1, 2, 1], [1]]);
});

it('one that is too large by itself is kept', () => {
  expect(ask(MiB, 2 * MiB, [0, 0, 0])).toEqual([[0], []]);
});

it('what is read anew for want of room is counted, and warned of once', async () => {
  const metrics = new RequestMetrics();
  const warn = vi.spyOn(silent, 'warn');
  const told = rereadTold(metrics, silent);
  for (let i = 0; i < 3; i++) told('demo', 1_024);
  expect(warn.mock.calls).toEqual([
    [{ model: 'demo' }, expect.stringMatching(/do not fit into 1024 MiB .*; serve fewer models by one coordinator$/)],
  ]);
  const text = await metrics.text({ workers: () => [] });
  expect(text).toContain('kvtier_request_tokenizer_rereads_total 3\n');
  warn.mockRestore();
});

it('a tokenizer counts as more than its file', () => {
  expect(loadTokenizer(modelDir).heldBytes).toBeGreaterThan(8 * MiB);
});
