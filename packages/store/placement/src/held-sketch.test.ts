/** What engines read of what is held: too much now and then, never too little. */
import { expect, it } from 'vitest';
import { HeldSketch } from './held-sketch.ts';

it('a bucket says what its blocks say together, and is written only when that changes', () => {
  const writes: [number, number][] = [];
  const sketch = new HeldSketch({ buckets: 16, write: (...write) => writes.push(write) }, 0b101);
  sketch.change(5, 0, 0b10); // one that peers hold
  sketch.change(21, 0, 0b1); // another one of the same bucket in the arena
  sketch.change(5, 0b10, 0b1010);
  sketch.change(21, 0b1, 0);
  sketch.change(5, 0b1010, 0b1110);
  sketch.change(5, 0b1110, 0);
  sketch.change(-1, 0, 1);
  expect(writes).toEqual([
    [5, 2],
    [5, 7],
    [5, 2],
    [5, 3],
    [5, 0],
    [15, 7],
  ]);
});

it('a bucket that was fuller than can be counted says held for ever', () => {
  const told = new Uint8Array(2);
  const sketch = new HeldSketch({ buckets: 2, write: (bucket, flags) => told.fill(flags, bucket, bucket + 1) }, 1);
  for (let block = 0; block < 300; block++) sketch.change(2 * block, 0, 1);
  for (let block = 0; block < 300; block++) sketch.change(2 * block, 1, 0);
  expect([...told]).toEqual([7, 0]);
});
