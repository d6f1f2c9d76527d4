import { type IoHandle, native } from '@kvtier/data-plane';
import { afterEach, expect, it, vi } from 'vitest';
import { TestBench } from '../kit/testing/objects.ts';
import { DiskIo, type ObjectRow } from './disk-io.ts';

let bench: TestBench | undefined;
afterEach(() => {
  vi.restoreAllMocks();
  bench?.dispose();
});

/** A queue whose rows end when the test says so. */
function queue(): { io: DiskIo; end: (tags: readonly number[]) => void } {
  bench = new TestBench();
  let ended: (tags: Float64Array, results: Float64Array) => void = () => {};
  vi.spyOn(native, 'ioOpen').mockImplementation((_arena, _settings, onEnded) => {
    ended = onEnded;
    return {} as IoHandle;
  });
  vi.spyOn(native, 'ioSubmit').mockImplementation(() => {});
  vi.spyOn(native, 'ioClose').mockImplementation(async () => {});
  const settings = { backend: 'threads', depth: 64 } as unknown as ConstructorParameters<typeof DiskIo>[2];
  return {
    io: new DiskIo(bench.arena, bench.tier, settings, () => 0),
    end: (tags) => ended(Float64Array.from(tags), Float64Array.from(tags)),
  };
}

const turn = (): Promise<void> => new Promise(setImmediate);

it('many rows that end at once are told over many turns, in their order, and each once', async () => {
  const { io, end } = queue();
  const told: number[] = [];
  const row = (_: unknown, i: number): ObjectRow => {
    return { file: 0, offset: 0, slot: i, bytes: 4096, onDone: (result) => told.push(result) };
  };
  io.read(Array.from({ length: 1_000 }, row), Buffer.alloc(64_000));
  const tags = Array.from({ length: 1_000 }, (_, i) => i);
  end(tags.slice(0, 900));
  const counts = [told.length];
  end(tags.slice(900)); // they wait behind those before them
  while (told.length < 1_000) {
    await turn();
    counts.push(told.length);
  }
  expect(counts).toEqual([256, 512, 768, 1_000]);
  expect(told).toEqual(tags);
  expect(io.inFlightCount).toBe(0);
});

it('rows that end a few at a time, many times in one turn, are told over many turns, too', async () => {
  const { io, end } = queue();
  const told: number[] = [];
  const row = (_: unknown, i: number): ObjectRow => {
    return { file: 0, offset: 0, slot: i, bytes: 4096, onDone: (result) => told.push(result) };
  };
  io.read(Array.from({ length: 1_000 }, row), Buffer.alloc(64_000));
  const tags = Array.from({ length: 1_000 }, (_, i) => i);
  for (let at = 0; at < 1_000; at += 100) end(tags.slice(at, at + 100));
  const counts = [told.length];
  while (told.length < 1_000) {
    await turn();
    counts.push(told.length);
  }
  expect(counts).toEqual([100, 356, 612, 868, 1_000]);
  expect(told).toEqual(tags);
});

it('rows that mean much work are told for some milliseconds of a turn, one at least', async () => {
  const { io, end } = queue();
  let nowMs = 0;
  vi.spyOn(performance, 'now').mockImplementation(() => nowMs);
  let told = 0;
  const row = (): ObjectRow => ({
    ...{ file: 0, offset: 0, slot: 0, bytes: 4096 },
    onDone: () => {
      told++;
      nowMs += told < 20 ? 2 : 80;
    },
  });
  io.read(Array.from({ length: 21 }, row), Buffer.alloc(64 * 21));
  end(Array.from({ length: 21 }, (_, i) => i));
  const counts = [told];
  while (told < 21) {
    await turn();
    counts.push(told);
  }
  expect(counts).toEqual([3, 6, 9, 12, 15, 18, 20, 21]);
});

it('what has ended and is not told yet is told before the queue is closed', async () => {
  const { io, end } = queue();
  let told = 0;
  const row = (): ObjectRow => ({ file: 0, offset: 0, slot: 0, bytes: 4096, onDone: () => void told++ });
  io.read(Array.from({ length: 300 }, row), Buffer.alloc(64 * 300));
  end(Array.from({ length: 300 }, (_, i) => i));
  expect(told).toBe(256);
  await io.close();
  expect(told).toBe(300);
  expect(native.ioClose).toHaveBeenCalledOnce();
  await turn();
  expect(told).toBe(300);
});
