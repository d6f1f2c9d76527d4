/**
 * Which partitions are in, each for itself: in a Cluster, what happens to one server costs the partitions that it has.
 *
 *     out ──open──▶ opened ──list──▶ in ──lost──▶ out, and unlisted in slices ──▶ opened ...
 *
 * Invariants: of one that is out and was unlisted nothing is in the index, and no command of the tier is sent for it; it is not opened before
 * it was unlisted. `open` and `list` are not called while one of them runs.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { asRedisError } from '@kvtier/redis';
import type { Directory } from './directory.ts';
import type { Partition, RedisCommands } from './redis-commands.ts';
import type { RedisIndex } from './redis-index.ts';
import { checkServer } from './server-check.ts';
import type { RedisTierOptions } from './settings.ts';
import type { Values } from './values.ts';

const progressEntries = 100_000;
/** No answer within the limit, as ioredis says it. */
const silence = /timed out/i;

/** The same at every node: hashes are evenly spread in themselves. */
export function partitionOf(hash: HashKey, count: number): number {
  if (count === 1) return 0;
  return (
    (((hash.charCodeAt(4) << 24) | (hash.charCodeAt(5) << 16) | (hash.charCodeAt(6) << 8) | hash.charCodeAt(7)) >>> 0) %
    count
  );
}

/** What `open` came to. */
interface Opened {
  readonly directories: readonly Directory[];
  /** All of these are new and empty. */
  readonly isNew: boolean;
  readonly failed: readonly KvError[];
}

export class Partitions {
  readonly #options: RedisTierOptions;
  readonly #index: RedisIndex;
  readonly #commands: RedisCommands;
  readonly #values: Values;
  readonly #directories: readonly Directory[];
  /** Those that are out, and why. */
  readonly #out = new Map<Directory, string>();
  /** Those that the next pass over the index unlists. */
  #leaving = new Set<number>();
  #unlisted: Promise<void> = Promise.resolve();

  constructor(
    options: RedisTierOptions,
    index: RedisIndex,
    commands: RedisCommands,
    values: Values,
    directories: readonly Directory[],
  ) {
    this.#options = options;
    this.#index = index;
    this.#commands = commands;
    this.#values = values;
    this.#directories = directories;
    this.endAll('starting');
  }

  isIn(directory: Directory): boolean {
    return !this.#out.has(directory);
  }

  get outCount(): number {
    return this.#out.size;
  }

  /** Why those that are out are, in one line; '': all are in. */
  get reason(): string {
    const [reason] = this.#out.values();
    return reason === undefined ? '' : `${this.#out.size} of ${this.#directories.length} partitions are out: ${reason}`;
  }

  /** Take those that are out as they are, or make them. Who fails stays out. */
  async open(): Promise<Opened> {
    const out = [...this.#out.keys()];
    await this.#unlisted;
    const { log } = this.#options;
    const shareBytes = Math.floor(this.#options.settings.bytes / this.#directories.length);
    const warnings = new Set<string>();
    let isNew = true;
    const failed: KvError[] = [];
    const openOne = async (directory: Directory): Promise<void> => {
      const all = this.#directories.map(({ partition }) => partition);
      warnings.add(await checkServer(this.#commands, directory.partition, all, this.#options.settings));
      isNew = (await directory.open(all.length, shareBytes)) && isNew;
    };
    const tryIt = async (directory: Directory, step: (directory: Directory) => Promise<void>): Promise<void> => {
      await step(directory).catch((error: unknown) => failed.push(this.#failed(directory, error)));
    };
    // At once: those of a server that says nothing cost one time limit together.
    await Promise.all(out.map((directory) => tryIt(directory, openOne)));
    for (const directory of out) {
      if (directory.isOpen) await tryIt(directory, ({ partition }) => this.#probe(partition));
    }
    const directories = out.filter(({ isOpen }) => isOpen);
    for (const reason of warnings) {
      if (reason !== '') log.warn({ tier: 'redis', reason }, 'the server may drop blocks by itself');
    }
    if (directories.some(({ capacityBytes }) => capacityBytes !== shareBytes)) {
      const reason =
        'the servers keep the budget that they have: they refuse writes now, or another node has just set its own; restart this node once they take writes';
      log.warn({ tier: 'redis', reason }, 'the budget is not the one of this configuration');
    }
    return { directories, isNew, failed };
  }

  /** What these have, one after the other; who was listed is in. Returns why others were not. */
  async list(directories: readonly Directory[]): Promise<KvError[]> {
    let listed = 0;
    const onPage = (count: number): void => {
      const before = Math.floor(listed / progressEntries);
      listed += count;
      if (Math.floor(listed / progressEntries) > before) this.#options.log.info({ tier: 'redis', listed }, 'listing');
    };
    const failed: KvError[] = [];
    for (const directory of directories) {
      try {
        await this.#listOne(directory, onPage);
      } catch (error) {
        failed.push(this.#failed(directory, error));
        if (this.#options.settings.mode !== 'cluster') break; // one server has all
        continue;
      }
      // Ended in just this moment: it is out.
      if (directory.isOpen) this.#out.delete(directory);
    }
    return failed;
  }

  /** It is out; its blocks are unlisted from this turn on. */
  leave(directory: Directory, { code, message }: KvError): void {
    if (directory.isOpen) this.#unlist(directory);
    directory.end();
    this.#out.set(directory, message);
    // Its server, silent, may be connected to nothing any more.
    if (code === 'DEADLINE' || silence.test(message)) this.#commands.resetServer(directory.partition);
  }

  /** All are out; the caller empties the index. */
  endAll(reason: string): void {
    for (const directory of this.#directories) {
      directory.end();
      this.#out.set(directory, reason);
    }
  }

  /** What is unlisted now is. */
  async close(): Promise<void> {
    await this.#unlisted;
  }

  async #probe(partition: Partition): Promise<void> {
    const probe = await this.#values.probe(partition);
    if (probe !== 'ok') throw asRedisError(new Error(`values cannot be moved: ${probe}`));
  }

  async #listOne(directory: Directory, onPage: (count: number) => void): Promise<void> {
    const before = directory.nonsense;
    await directory.list(onPage);
    await directory.poll();
    const entries = directory.nonsense - before;
    if (entries === 0) return;
    const { base } = directory.partition;
    this.#options.log.warn({ tier: 'redis', base, entries }, 'entries that are none were removed from the directory');
  }

  #failed(directory: Directory, thrown: unknown): KvError {
    const error = KvError.from(thrown);
    this.leave(directory, error);
    return error;
  }

  /** One pass for all that leave in this turn, or while another pass is under way. */
  #unlist({ partition }: Directory): void {
    this.#leaving.add(partition.index);
    if (this.#leaving.size > 1) return;
    this.#unlisted = this.#unlisted.then(() => {
      const gone = this.#leaving;
      this.#leaving = new Set();
      return this.#index.removeAll((hash) => gone.has(partitionOf(hash, this.#directories.length)));
    });
  }
}
