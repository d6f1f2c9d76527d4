/** In what pages an arena lies: the kernel merges small ones into huge ones, and splits them, at any time. */
import { readFile } from 'node:fs/promises';

export interface ArenaPages {
  /** Of the file system: 4096, or more on hugetlbfs. */
  readonly pageBytes: number;
  /** Bytes that lie in huge pages: all on hugetlbfs; else transparent ones, as many as the kernel had to give. */
  readonly hugeBytes: number;
}

export const smallPageBytes = 4096;

const lookAgainMs = 60_000;
/**
 * To answer, the kernel walks every small page, about 20 ms a GiB, and meanwhile this process cannot map or unmap anything. Where more of
 * the arena than this lies in small ones, what is told is what was seen at the start, before anybody is served.
 */
const mostSmallBytes = 2 * 2 ** 30;

/** What the kernel says of all mappings of this process, as proc_pid_smaps(5). */
const ownMaps = (): Promise<string> => readFile('/proc/self/smaps', 'utf8');

export class PageWatch {
  readonly #file: string;
  readonly #pageBytes: number;
  readonly #bytes: number;
  readonly #maps: () => Promise<string>;
  #transparentBytes = 0;
  #lookedAtMs: number;
  /** The look at the start has ended: who serves waits for it, since it may hold the process up. */
  readonly begun: Promise<void>;

  /** Of the mapping of `file`, which is there. */
  constructor(file: string, bytes: number, pageBytes: number, maps = ownMaps, nowMs = performance.now()) {
    this.#file = file;
    this.#bytes = bytes;
    this.#pageBytes = pageBytes;
    this.#maps = maps;
    this.#lookedAtMs = nowMs;
    this.begun = this.#look();
  }

  /** As the kernel said a minute ago at most, or at the start where much lies in small pages. Never waits. */
  pages(nowMs = performance.now()): ArenaPages {
    if (nowMs - this.#lookedAtMs > lookAgainMs && this.#bytes - this.#transparentBytes <= mostSmallBytes) {
      this.#lookedAtMs = nowMs;
      void this.#look();
    }
    const isHuge = this.#pageBytes > smallPageBytes;
    return { pageBytes: this.#pageBytes, hugeBytes: isHuge ? this.#bytes : this.#transparentBytes };
  }

  async #look(): Promise<void> {
    try {
      this.#transparentBytes = transparentBytes(await this.#maps(), this.#file);
    } catch {
      // The kernel does not say: what was known stays.
    }
  }
}

/** Of the mapping of `file`; 0 when it is not told. */
function transparentBytes(maps: string, file: string): number {
  const begin = maps.indexOf(`${file}\n`); // its lock file is mapped, too
  const own = begin < 0 ? undefined : /^ShmemPmdMapped: +(\d+) kB$/m.exec(maps.slice(begin));
  return Number(own?.[1] ?? 0) * 1024;
}
