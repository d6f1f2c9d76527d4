/**
 * Which partitions are in, each for itself: in a Cluster, what happens to one server costs the partitions that it has.
 *
 *     out ──open──▶ opened ──list──▶ in ──lost──▶ out, and unlisted in slices ──▶ opened ...
 *
 * Invariants: of one that is out and was unlisted nothing is in the index, and no command of the tier is sent for it; it is not opened before
 * it was unlisted. `open` and `list` take all that are out together, when the tier comes in, and are not called while anything of them or
 * of `mend` runs. That takes each by itself, while others are in.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { asRedisError } from '@kvtier/redis';
import { type Directory, NewerDirectory } from './directory.ts';
import type { RedisCommands } from './redis-commands.ts';
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
  /** Those that `mend` is trying. */
  readonly #mending = new Map<Directory, Promise<void>>();
  /** The end of the last listing that `mend` has begun. */
  #listing: Promise<void> = Promise.resolve();
  /** Grows with each end of all: what was tried before it is over. */
  #life = 0;
  /** Entries that were listed, and warnings that were given, since those that are out were last tried together. */
  #listed = 0;
  readonly #warned = new Set<string>();

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

  /**
   * Take those that are out as they are, or make them. Who fails stays out. All are asked what they are before the first is changed: the
   * budget of whoever opens one holds for all nodes. `isStrict`: what waiting does not mend, at one of them, ends it. One that a newer
   * program made ends it in any case: the others are that one's, too, those that are not there among them.
   */
  async open(isStrict: boolean): Promise<Opened> {
    const out = [...this.#out.keys()];
    await this.#unlisted;
    this.#begin();
    let isNew = true;
    const failed: KvError[] = [];
    const { mode } = this.#options.settings;
    // Where one server has all, none of them is better off.
    const isOver = (): boolean =>
      failed.some((each) => mode !== 'cluster' || (isStrict && !each.retry) || each instanceof NewerDirectory);
    const tryIt = async (directory: Directory, step: () => Promise<void>): Promise<boolean> => {
      try {
        await step();
        return true;
      } catch (error) {
        failed.push(this.#failed(directory, error));
        return false;
      }
    };
    // At once: those of a server that says nothing cost one time limit together.
    const ask = async (directory: Directory): Promise<void> => {
      await this.#check(directory);
      await directory.look();
    };
    const answers = await Promise.all(out.map((directory) => tryIt(directory, () => ask(directory))));
    const directories: Directory[] = [];
    for (const directory of out.filter((_, i) => answers[i])) {
      if (isOver()) break;
      const openOne = async (): Promise<void> => {
        isNew = (await this.#openOne(directory)) && isNew;
      };
      if (await tryIt(directory, openOne)) directories.push(directory);
    }
    return { directories: directories.filter(({ isOpen }) => isOpen), isNew, failed };
  }

  /** What these have, one after the other; who was listed is in. Returns why others were not. */
  async list(directories: readonly Directory[]): Promise<KvError[]> {
    const failed: KvError[] = [];
    for (const directory of directories) {
      try {
        await this.#listOne(directory);
      } catch (error) {
        failed.push(this.#failed(directory, error));
        if (this.#options.settings.mode !== 'cluster') break; // one server has all
      }
    }
    return failed;
  }

  /** Each of those that are out is tried by itself: none waits for a server that says nothing, but its own. `onIn`: one was listed. */
  mend(onIn: (directory: Directory) => void): void {
    if (this.#mending.size === 0) this.#begin();
    for (const directory of this.#out.keys()) {
      if (this.#mending.has(directory)) continue;
      const mending = this.#mendOne(directory, onIn).finally(() => this.#mending.delete(directory));
      this.#mending.set(directory, mending);
    }
  }

  /** Nothing that `mend` has begun goes on. */
  async mended(): Promise<void> {
    await Promise.all(this.#mending.values());
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
    this.#life++;
    for (const directory of this.#directories) {
      directory.end();
      this.#out.set(directory, reason);
    }
  }

  /** What is tried now has ended, and what is unlisted now is. */
  async close(): Promise<void> {
    await this.mended();
    await this.#unlisted;
  }

  async #mendOne(directory: Directory, onIn: (directory: Directory) => void): Promise<void> {
    const life = this.#life;
    const isOver = (): boolean => life !== this.#life;
    try {
      await this.#unlisted;
      if (isOver()) return;
      await this.#check(directory);
      if (!isOver() && !(await directory.look())) await this.#othersAreOurs(directory);
      if (isOver()) return;
      await this.#openOne(directory);
      // In turn: each is many answers to read.
      const listing = this.#listing.then(() => this.#listOne(directory));
      this.#listing = listing.catch(() => {});
      await listing;
      onIn(directory);
    } catch (error) {
      if (!isOver()) this.#failed(directory, error);
    }
  }

  get #shareBytes(): number {
    return Math.floor(this.#options.settings.bytes / this.#directories.length);
  }

  #begin(): void {
    this.#listed = 0;
    this.#warned.clear();
  }

  async #check({ partition }: Directory): Promise<void> {
    const all = this.#directories.map((each) => each.partition);
    const reason = await checkServer(this.#commands, partition, all, this.#options.settings);
    if (reason !== '') this.#warn(reason, 'the server may drop blocks by itself');
  }

  /** None is made beside those of a newer program. One that cannot be asked says nothing of that. */
  async #othersAreOurs(directory: Directory): Promise<void> {
    const looks = this.#directories.map((each) => (each === directory ? undefined : each.look()));
    for (const result of await Promise.allSettled(looks))
      if (result.status === 'rejected' && result.reason instanceof NewerDirectory) throw result.reason;
  }

  /** Returns whether it is new and empty. */
  async #openOne(directory: Directory): Promise<boolean> {
    const isNew = await directory.open(this.#directories.length, this.#shareBytes);
    const probe = await this.#values.probe(directory.partition);
    if (probe !== 'ok') throw asRedisError(new Error(`values cannot be moved: ${probe}`));
    if (directory.capacityBytes !== this.#shareBytes) {
      const reason =
        'the servers keep the budget that they have: they refuse writes now, or another node has just set its own; restart this node once they take writes';
      this.#warn(reason, 'the budget is not the one of this configuration');
    }
    return isNew;
  }

  /** It is in, unless it has ended in just this moment. */
  async #listOne(directory: Directory): Promise<void> {
    const before = directory.nonsense;
    await directory.list((count) => this.#onPage(count));
    await directory.poll();
    const entries = directory.nonsense - before;
    if (entries > 0) {
      const { base } = directory.partition;
      this.#options.log.warn({ tier: 'redis', base, entries }, 'entries that are none were removed from the directory');
    }
    if (directory.isOpen) this.#out.delete(directory);
  }

  #onPage(count: number): void {
    const before = Math.floor(this.#listed / progressEntries);
    this.#listed += count;
    if (Math.floor(this.#listed / progressEntries) === before) return;
    this.#options.log.info({ tier: 'redis', listed: this.#listed }, 'listing');
  }

  #warn(reason: string, message: string): void {
    if (this.#warned.has(reason)) return;
    this.#warned.add(reason);
    this.#options.log.warn({ tier: 'redis', reason }, message);
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
