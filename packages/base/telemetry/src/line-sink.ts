/**
 * Lines to stderr that never make the process wait: whoever reads them may have stopped, the file may lie on a disk that hangs.
 * Invariant: at most `maxBytes` of lines are held; what comes beyond is dropped, and counted in a line of its own once there is room.
 */
import { fstatSync, write } from 'node:fs';

/** Calls back when `text` is out, or cannot be any more. */
export type Write = (text: string, done: () => void) => void;

const defaultMaxBytes = 1 << 20;

export class LineSink {
  readonly #write: Write;
  readonly #maxBytes: number;
  #queue: string[] = [];
  #queuedBytes = 0;
  #writingBytes = 0;
  #isWriting = false;
  #dropped = 0;
  #onIdle: (() => void)[] = [];

  constructor(write: Write, maxBytes = defaultMaxBytes) {
    this.#write = write;
    this.#maxBytes = maxBytes;
  }

  /** `text`: whole lines, each with its line feed. */
  write(text: string): void {
    if (this.#queuedBytes + this.#writingBytes + text.length > this.#maxBytes) {
      this.#dropped++;
    } else {
      this.#queue.push(text);
      this.#queuedBytes += text.length;
    }
    this.#pump();
  }

  /** Resolves when everything is out, or after `limitMs`. */
  flush(limitMs: number): Promise<void> {
    if (!this.#isWriting) return Promise.resolve();
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, limitMs);
      this.#onIdle.push(() => {
        clearTimeout(timer);
        resolve();
      });
    });
  }

  #pump(): void {
    if (this.#isWriting) return;
    let text = this.#queue.join('');
    if (this.#dropped > 0) {
      const msg = `${this.#dropped} lines were dropped: nobody read them in time`;
      text += `${JSON.stringify({ level: 40, time: Date.now(), pid: process.pid, msg })}\n`; // held beyond the bound
    }
    if (text === '') {
      for (const resolve of this.#onIdle.splice(0)) resolve();
      return;
    }
    this.#writingBytes = this.#queuedBytes;
    this.#isWriting = true;
    this.#queue = [];
    this.#queuedBytes = 0;
    this.#dropped = 0;
    this.#write(text, () => {
      this.#writingBytes = 0;
      this.#isWriting = false;
      this.#pump();
    });
  }
}

/** Sockets, pipes and terminals by Node's own stream; a file through the pool, one write at a time. */
function writerOfStderr(): Write {
  if (fstatSync(2).isFile()) {
    const toFile: Write = (text, done) => writeAll(Buffer.from(text), done);
    return toFile;
  }
  process.stderr.on('error', () => {}); // the reader is gone
  return (text, done) => void process.stderr.write(text, () => done());
}

function writeAll(bytes: Buffer, done: () => void): void {
  write(2, bytes, (error, written) => {
    if (error || written >= bytes.length) done();
    else writeAll(bytes.subarray(written), done);
  });
}

let ours: LineSink | undefined;

/** The one of this process. */
export function stderrSink(): LineSink {
  ours ??= new LineSink(writerOfStderr());
  return ours;
}
