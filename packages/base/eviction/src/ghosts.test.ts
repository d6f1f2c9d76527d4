/** What s3-fifo remembers of what it evicted, over a long life. */
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import { expect, it } from 'vitest';
import { S3FifoPolicy } from './s3-fifo.ts';

setFlagsFromString('--expose-gc');
const collect = runInNewContext('gc') as () => void;
const heapBytes = (): number => {
  collect();
  return process.memoryUsage().heapUsed;
};

it('keeps its memory where half as much again as it holds is used in turns', () => {
  const [entries, names] = [1_000, 1_500];
  const policy = new S3FifoPolicy();
  const entryOf = new Map<number, number>();
  const nameOf: number[] = [];
  let evictions = 0;
  const use = (name: number): void => {
    const held = entryOf.get(name);
    if (held !== undefined) {
      policy.touch(held, 0);
      return;
    }
    let entry = entryOf.size;
    if (entry === entries) {
      entry = policy.victim(() => true)!;
      policy.remove(entry);
      entryOf.delete(nameOf[entry]!);
      evictions++;
    }
    nameOf[entry] = name;
    entryOf.set(name, entry);
    policy.insert(entry, 0, { name });
  };
  const rounds = (count: number): void => {
    for (let at = 0; at < count * names; at++) use(at % names);
  };
  rounds(20);
  const before = heapBytes();
  rounds(400);
  expect(evictions).toBeGreaterThan(300_000);
  expect(heapBytes() - before).toBeLessThan(4 * 2 ** 20);
});
