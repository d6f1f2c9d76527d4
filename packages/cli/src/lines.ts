/**
 * The lines of a process's output, as they come. One without an end is told in its first `maxLineBytes`: what a service writes is
 * not ours to trust with our memory.
 */
import type { Readable } from 'node:stream';

const newline = 10;
const carriageReturn = 13;
export const maxLineBytes = 64 * 1_024;

/** `onLine` gets each line as UTF-8 without its end ("\n" or "\r\n"); what is left at the end of the stream is a line as well. */
export function readLines(stream: Readable, onLine: (line: string) => void, maxBytes = maxLineBytes): void {
  let parts: Buffer[] = [];
  let kept = 0;
  let dropped = 0;
  const keep = (bytes: Buffer): void => {
    const fits = bytes.subarray(0, maxBytes - kept);
    // A copy: a line of ten bytes must not hold the chunk that it came in.
    if (fits.length > 0) parts.push(Buffer.from(fits));
    kept += fits.length;
    dropped += bytes.length - fits.length;
  };
  const tell = (): void => {
    let line = Buffer.concat(parts);
    if (dropped === 0 && line.at(-1) === carriageReturn) line = line.subarray(0, -1);
    onLine(line.toString('utf8') + (dropped > 0 ? ` … (${dropped} bytes more)` : ''));
    [parts, kept, dropped] = [[], 0, 0];
  };
  stream.on('data', (chunk: Buffer) => {
    let from = 0;
    for (let end = chunk.indexOf(newline); end !== -1; end = chunk.indexOf(newline, from)) {
      keep(chunk.subarray(from, end));
      tell();
      from = end + 1;
    }
    keep(chunk.subarray(from));
  });
  stream.on('end', () => {
    if (kept > 0) tell();
  });
}
