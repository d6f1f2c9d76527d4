/**
 * A process that prints how many bytes a decision among many workers leaves to be collected. Started with --no-concurrent-recompilation, so
 * that the compiler comes at the same call whatever else the machine does; with nothing in it that other code has taught the compiler.
 */
import { maxMedia } from '@kvtier/kv-index';
import { policies, type WorkerState } from '../index.ts';

const count = Number(process.argv[2]);
// Each is better than all before it, so that none is skipped.
const workers = Array.from({ length: count }, (_, i): WorkerState => {
  const byMedium = new Int32Array(maxMedia);
  byMedium[i % 3] = i % 5;
  return {
    ...{
      waiting: 0,
      running: i % 7,
      tokensAhead: 37 * (count - i),
      usedBlocks: 0,
      totalBlocks: 1000,
      waitingBlocks: 0,
    },
    ...{ freedBlocksPerS: 10, loadAheadS: 0, prefillTokensPerS: 1000, stepS: 0.01, stepPerRequestS: 0.001 },
    ...{ loadBlocksPerS: [0, 1000, 100, 50], match: { blocks: i % 5, byMedium }, remoteBlocks: 0, remoteMedium: 3 },
  };
});
const request = {
  ...{ tokens: 67, maxTokens: 10, blockTokens: 16, session: '' },
  keys: Int32Array.from({ length: 8 }, (_, i) => (i * 0x9e3779b1) | 0),
};
const policy = policies.predicted();
const half = (): number => 0.5;

/** Of a hundred decisions, each; undefined: a collection came between. */
function bytesOfOne(): number | undefined {
  const before = process.memoryUsage().heapUsed;
  for (let i = 0; i < 100; i++) policy.choose(request, workers, 0, half);
  const bytes = (process.memoryUsage().heapUsed - before) / 100;
  return bytes > 0 ? bytes : undefined;
}

// Code that is not compiled yet makes objects of its own.
for (let i = 0; i < 200; i++) bytesOfOne();
const measured = Array.from({ length: 11 }, bytesOfOne).filter((bytes) => bytes !== undefined);
process.stdout.write(`${measured.sort((a, b) => a - b)[measured.length >> 1]}\n`);
