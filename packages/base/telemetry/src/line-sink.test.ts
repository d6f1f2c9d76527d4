import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { LineSink } from './line-sink.ts';

/** A reader who takes one text at a time, when told to. */
class Reader {
  readonly taken: string[] = [];
  #done: (() => void) | undefined;

  readonly write = (text: string, done: () => void): void => {
    expect(this.#done).toBeUndefined();
    this.taken.push(text);
    this.#done = done;
  };

  /** False: nothing was on its way. */
  read(): boolean {
    const done = this.#done;
    this.#done = undefined;
    done?.();
    return done !== undefined;
  }

  get lines(): string[] {
    return this.taken.join('').split('\n').slice(0, -1);
  }
}

const droppedOf = (line: string): number => Number(/"msg":"(\d+) lines were dropped/.exec(line)?.[1] ?? 0);

describe('lines', () => {
  it('go out at once, in order, and together where the reader was slow', () => {
    const reader = new Reader();
    const sink = new LineSink(reader.write);
    for (const line of ['a\n', 'b\n', 'c\n']) sink.write(line);
    expect(reader.taken).toEqual(['a\n']);
    reader.read();
    expect(reader.taken).toEqual(['a\n', 'b\nc\n']);
  });

  it('are told whole and in order, or dropped and counted, and never more is held than allowed', () => {
    const step = fc.oneof(fc.constant('read' as const), fc.integer({ min: 1, max: 12 }));
    fc.assert(
      fc.property(fc.array(step, { maxLength: 200 }), fc.integer({ min: 8, max: 60 }), (steps, maxBytes) => {
        const reader = new Reader();
        const sink = new LineSink(reader.write, maxBytes);
        const kept: string[] = []; // by a naive reckoning, as all of this
        let held: string[] = [];
        let waiting: string[] = [];
        let isWriting = false;
        let untold = 0;
        let dropped = 0;
        const pump = (): void => {
          isWriting = waiting.length + untold > 0;
          [held, waiting, untold] = [waiting, [], 0];
        };
        for (const [number, step] of steps.entries()) {
          if (step === 'read') {
            expect(reader.read()).toBe(isWriting);
            if (isWriting) pump();
            continue;
          }
          const line = String(number).padStart(step, '.');
          const bytes = [...held, ...waiting, line].reduce((sum, one) => sum + one.length + 1, 0);
          sink.write(`${line}\n`);
          if (bytes > maxBytes) {
            dropped++;
            untold++;
          } else {
            kept.push(line);
            waiting.push(line);
          }
          if (!isWriting) pump();
        }
        while (reader.read());
        expect(reader.lines.filter((line) => !line.startsWith('{'))).toEqual(kept);
        expect(reader.lines.reduce((sum, line) => sum + droppedOf(line), 0)).toBe(dropped);
      }),
    );
  });

  it('flush waits for the reader, but not for ever', async () => {
    const reader = new Reader();
    const sink = new LineSink(reader.write);
    await sink.flush(60_000); // nothing is on its way
    sink.write('a\n');
    sink.write('b\n');
    const begin = performance.now();
    await sink.flush(50);
    expect(performance.now() - begin).toBeGreaterThan(45);
    const flushed = sink.flush(60_000);
    reader.read();
    reader.read();
    await flushed;
    expect(reader.lines).toEqual(['a', 'b']);
  });
});
