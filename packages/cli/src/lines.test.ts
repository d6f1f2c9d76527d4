import { PassThrough } from 'node:stream';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { readLines } from './lines.ts';

const bytesOf = fc.array(fc.constantFrom('a', 'é', '\n', '\r', 'xyz', '\r\n'), { maxLength: 60 });

it('lines are the same however the output is cut into chunks', async () => {
  await fc.assert(
    fc.asyncProperty(bytesOf, fc.array(fc.nat(20)), async (words, cuts) => {
      const bytes = Buffer.from(words.join(''));
      const stream = new PassThrough();
      const lines: string[] = [];
      readLines(stream, (line) => lines.push(line));
      let from = 0;
      for (const cut of cuts) {
        stream.write(bytes.subarray(from, from + cut));
        from = Math.min(bytes.length, from + cut);
      }
      await new Promise<void>((resolve) => stream.on('end', resolve).end(bytes.subarray(from)));
      const naive = bytes.toString('utf8').split('\n');
      if (naive.at(-1) === '') naive.pop();
      expect(lines).toEqual(naive.map((line) => line.replace(/\r$/, '')));
    }),
  );
});

it('a line without an end costs its first bytes only, and says how much was left out', async () => {
  const stream = new PassThrough();
  const lines: string[] = [];
  readLines(stream, (line) => lines.push(line), 8);
  const ended = new Promise<void>((resolve) => stream.on('end', resolve));
  for (let i = 0; i < 1_000; i++) stream.write('0123456789');
  stream.write('\n12345678\n123456789\r\nno end');
  stream.end();
  await ended;
  expect(lines).toEqual(['01234567 … (9992 bytes more)', '12345678', '12345678 … (2 bytes more)', 'no end']);
});
