/**
 * A process that prints how many bytes a match leaves to be collected where many workers hold the whole prompt. Started with
 * --no-concurrent-recompilation, so that the compiler comes at the same call whatever else the machine does.
 */
import { foldsOf, KvIndex, Targets } from '../index.ts';

const count = Number(process.argv[2]);
const index = new KvIndex({ maxBytes: 4 * 1024 * 1024 });
const keys = Int32Array.from({ length: 2_000 }, (_, i) => Math.imul(i + 1, 0x9e3779b1));
foldsOf(keys);
const sources = Array.from({ length: count }, () => index.addSource());
for (const source of sources) index.stored(source, 0, keys, 'root');
const targets = new Targets(sources.map((source) => ({ sources: [source] })));

/** Of a hundred matches, each; undefined: a collection came between. */
function bytesOfOne(): number | undefined {
  const before = process.memoryUsage().heapUsed;
  for (let i = 0; i < 100; i++) index.match(keys, targets);
  const bytes = (process.memoryUsage().heapUsed - before) / 100;
  return bytes > 0 ? bytes : undefined;
}

// Code that is not compiled yet makes objects of its own.
for (let i = 0; i < 200; i++) bytesOfOne();
const measured = Array.from({ length: 11 }, bytesOfOne).filter((bytes) => bytes !== undefined);
process.stdout.write(`${measured.sort((a, b) => a - b)[measured.length >> 1]}\n`);
