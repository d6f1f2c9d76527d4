/** Traces in Mooncake's format, whatever their block size, order and ids. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { bundledTraces, readTrace, readTraces } from './traces.ts';

let folder: string;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-traces-'));
});
afterEach(() => rmSync(folder, { recursive: true }));

function read(lines: readonly (object | string)[]) {
  const path = join(folder, 'some.jsonl');
  writeFileSync(path, lines.map((line) => (typeof line === 'string' ? line : JSON.stringify(line))).join('\n'));
  return readTrace(path, 'some');
}

const ids = (count: number, from = 0): number[] => Array.from({ length: count }, (_, i) => from + i);

it.each([16, 64, 512])(
  'blocks of %i tokens are found, of short prompts, too, with the last one begun or left out',
  (size) => {
    const lengths = [size + 3, 2 * size - 1, size - 1, 3 * size, size / 2, 7 * size + 1];
    for (const round of [Math.ceil, Math.floor])
      expect(
        read(lengths.map((input_length) => ({ input_length, hash_ids: ids(round(input_length / size)) }))).blockTokens,
      ).toBe(size);
  },
);

it.each([24, 48, 1_000])('blocks of %i tokens are found, of prompts that are long enough to tell', (size) => {
  const lengths = [size + 3, 20 * size, 4_000 * size - 1, 4_000 * size, 4_000 * size + 1];
  for (const round of [Math.ceil, Math.floor])
    expect(
      read(lengths.map((input_length) => ({ input_length, hash_ids: ids(round(input_length / size)) }))).blockTokens,
    ).toBe(size);
});

it('the bundled ones have the blocks that are written beside them', () => {
  expect(readTraces(bundledTraces).map(({ name, blockTokens }) => [name, blockTokens])).toEqual([
    ['agentic', 64],
    ['conversation', 512],
    ['synthetic', 512],
  ]);
});

it('lines out of order are sorted, hashes as ids are told apart, and without times one comes a second', () => {
  const [one, other] = [2 ** 52 + 1, 2 ** 52 + 2 ** 32 + 1];
  const line = { input_length: 32, output_length: 3 };
  const trace = read([
    { ...line, timestamp: 20, hash_ids: [one, other] },
    { ...line, timestamp: 10, hash_ids: [other, 7] },
  ]);
  expect([...trace.arrivalsMs]).toEqual([10, 20]);
  expect(trace.requests.map((request) => [...request])).toEqual([
    [1, 2],
    [0, 1],
  ]);
  expect(trace.uniqueBlocks).toBe(3);
  expect([...read([1, 2, 3].map((n) => ({ ...line, timestamp: 0, hash_ids: [n, n] }))).arrivalsMs]).toEqual([
    0, 1_000, 2_000,
  ]);
});

it('ids above 2^53 are told apart, and text is an id; times of as many digits stay numbers', () => {
  const line = (ids: string, at: string): string => `{"timestamp": ${at}, "input_length": 48, "hash_ids": [${ids}]}`;
  const trace = read([
    line('9007199254740993, 9007199254740992,-1234567890123456789', '1700000000000001'),
    line('9007199254740993,"deadbeefdeadbeef1234567890123456", 0.5', '1700000000000003'),
  ]);
  expect(trace.requests.map((request) => [...request])).toEqual([
    [0, 1, 2],
    [0, 3, 4],
  ]);
  expect(trace.arrivalsMs[1]! - trace.arrivalsMs[0]!).toBe(2);
});

it('a mark of the byte order, empty lines, line ends of Windows, and answers or times of null are read', () => {
  const line = JSON.stringify({ timestamp: null, input_length: 32, output_length: null, hash_ids: [1, 2] });
  const trace = read([`\ufeff${line}\r`, '', `${line}\r`]);
  expect([[...trace.outputTokens], [...trace.arrivalsMs]]).toEqual([
    [1, 1],
    [0, 1_000],
  ]);
});

it('a few requests that are counted otherwise do not change the size that all others say', () => {
  const sound = Array.from({ length: 200 }, (_, i) => ({ input_length: 512 * (i + 1), hash_ids: ids(i + 1) }));
  expect(read([...sound, { input_length: 5_110, hash_ids: ids(11) }]).blockTokens).toBe(512);
});

it('what cannot be read is one line that says so', () => {
  expect(() => readTrace(join(folder, 'none.jsonl'), 'none')).toThrow(/none\.jsonl: cannot be read .* name a trace/);
});

it.each([
  'nonsense',
  { input_length: 5 },
  { input_length: -1, hash_ids: [] },
  { input_length: 5, hash_ids: [null] },
  { input_length: 5, hash_ids: [''] },
  { input_length: 5, hash_ids: [1], output_length: 0.5 },
  { input_length: 5, hash_ids: [1], timestamp: 'now' },
])('what is no line of a trace is refused with its number: %j', (line) => {
  expect(() => read([{ input_length: 16, hash_ids: [1] }, line])).toThrow(/some\.jsonl:2: not a line of a trace/);
});

it('prompts too short for a whole block are a trace, and a file without a line is none', () => {
  const short = read([
    { input_length: 40, hash_ids: [] },
    { input_length: 50, hash_ids: [] },
  ]);
  expect([short.requests.length, short.uniqueBlocks]).toEqual([2, 0]);
  expect(() => read([''])).toThrow('no request in it');
});
