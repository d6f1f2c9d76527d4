/**
 * The tier's life with its servers: connect, list, follow; out of service when the world breaks them, back with a backoff.
 *
 *     starting ──▶ listing ──▶ in service ──(lost, timeout, no ledger)──▶ out ──backoff──▶ listing ...
 *
 * Invariant: out of service the index is empty and no connection for values exists, so that nothing can arrive in a slot.
 */
import { invariant, KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { asRedisError } from '@kvtier/redis';
import { Directory } from './directory.ts';
import { RedisCommands } from './redis-commands.ts';
import type { RedisIndex } from './redis-index.ts';
import { checkServers } from './server-check.ts';
import type { RedisTierOptions } from './settings.ts';
import { Values } from './values.ts';

type State = 'starting' | 'listing' | 'in' | 'out' | 'closed';

const defaultPollMs = 200;
const firstBackoffMs = 100;
const maxBackoffMs = 5000;
const progressEntries = 100_000;

/** The same at every node: hashes are evenly spread in themselves. */
export function partitionOf(hash: HashKey, count: number): number {
  if (count === 1) return 0;
  return (
    (((hash.charCodeAt(4) << 24) | (hash.charCodeAt(5) << 16) | (hash.charCodeAt(6) << 8) | hash.charCodeAt(7)) >>> 0) %
    count
  );
}

/** The last three: a slot of a Cluster moves, sent here and there meanwhile, and with it one partition; the others go on. */
const isOfOneCommand = /\b(OOM|MISCONF|NOREPLICAS|TRYAGAIN|redirections\. Last error: \w+: (MOVED|ASK))\b/;

export class RedisService {
  readonly #options: RedisTierOptions;
  readonly #index: RedisIndex;
  readonly #commands: RedisCommands;
  readonly values: Values;
  readonly directories: readonly Directory[];
  #state: State = 'starting';
  #reason = 'starting';
  #timer: NodeJS.Timeout | undefined;
  #backoffMs = firstBackoffMs;
  /** Grows with every loss: what began before it is over. */
  #life = 0;
  #busy: Promise<void> = Promise.resolve();
  /** Why the server last refused a command that it may take later. */
  #refusal = '';
  connectionsLost = 0;

  /** KvError CONFIG for what cannot work. */
  constructor(options: RedisTierOptions, index: RedisIndex, node: string) {
    this.#options = options;
    this.#index = index;
    this.#commands = new RedisCommands(options.settings, (reason) => this.fail(reason));
    this.values = new Values(this.#commands, options, (line) => {
      this.connectionsLost++;
      if (this.#state === 'in') options.log.warn({ tier: 'redis', reason: line }, 'a transfer broke');
    });
    this.directories = this.#commands.partitions().map((each) => new Directory(each, this.#commands, index, node));
  }

  get inService(): boolean {
    return this.#state === 'in';
  }

  /** Commands may be sent. */
  get reachable(): boolean {
    return this.#state === 'in' || this.#state === 'listing';
  }

  get outOfServiceReason(): string {
    return this.#state === 'in' ? '' : this.#reason;
  }

  /** The first time: what cannot work is thrown. */
  async start(): Promise<void> {
    await this.#enter();
  }

  /** Out of service from the start, and tried again. */
  startLater(reason: string): void {
    this.#leave(reason);
    this.#options.log.warn({ tier: 'redis', reason }, 'the redis tier starts out of service');
    this.#later(this.#backoffMs, () => this.#recover());
  }

  /** Out of service, loudly; then tried again. */
  fail(reason: string): void {
    if (this.#state !== 'in' && this.#state !== 'listing') return;
    const wasIn = this.#state === 'in';
    this.#leave(reason);
    if (wasIn) this.#options.log.error({ tier: 'redis', reason }, 'the redis tier is out of service');
    this.#later(this.#backoffMs, () => this.#recover());
  }

  /** A command did not end well: some reasons are about that command alone. */
  commandFailed(error: unknown): void {
    if (!(error instanceof KvError)) throw error;
    if (error.code === 'CANCELLED') return;
    if (isOfOneCommand.test(error.message)) {
      // Once: whoever asks again and again is refused as often.
      if (error.message !== this.#refusal) {
        this.#refusal = error.message;
        this.#options.log.warn({ tier: 'redis', reason: error.message }, 'the server refuses to write');
      }
      return;
    }
    this.fail(error.message);
  }

  async close(): Promise<void> {
    this.#state = 'closed';
    this.#reason = 'closed';
    this.#life++;
    clearTimeout(this.#timer);
    this.values.close();
    this.#commands.close();
    await this.#busy;
  }

  checkIntegrity(): void {
    const lists = this.#state !== 'out' && this.#state !== 'starting';
    invariant(lists || this.#index.count === 0, 'redis: blocks are listed out of service');
    for (const { usedBytes, capacityBytes } of this.directories) {
      invariant(usedBytes <= capacityBytes, 'redis: a partition is over its share of the budget');
    }
  }

  /** Whatever was begun is over, and nothing of it is left. */
  #leave(reason: string): void {
    this.#state = 'out';
    this.#reason = reason;
    this.#life++;
    for (const directory of this.directories) directory.end();
    this.values.disconnect(reason);
    this.#commands.reset();
    this.#index.clear();
  }

  async #enter(): Promise<void> {
    const { settings, log } = this.#options;
    const life = this.#life;
    await this.#commands.ready(settings.timeLimitMs);
    const warning = await checkServers(
      this.#commands,
      this.directories.map(({ partition }) => partition),
      settings,
    );
    if (warning !== '') log.warn({ tier: 'redis', reason: warning }, 'the server may drop blocks by itself');
    await this.#commands.loadScripts();
    if (life !== this.#life) return;
    const share = Math.floor(settings.bytes / this.directories.length);
    let isNew = true;
    for (const directory of this.directories) {
      isNew = (await directory.open(this.directories.length, share)) && isNew;
      const probe = await this.values.probe(directory.partition);
      if (probe !== 'ok') throw asRedisError(new Error(`values cannot be moved: ${probe}`));
    }
    if (this.directories.some(({ capacityBytes }) => capacityBytes !== share)) {
      const reason =
        'the servers keep the budget that they have: they refuse writes now, or another node has just set its own; restart this node once they take writes';
      log.warn({ tier: 'redis', reason }, 'the budget is not the one of this configuration');
    }
    if (life !== this.#life) return;
    // From here on losses empty the index again.
    this.#state = 'listing';
    this.#reason = 'listing what is there';
    await this.#list();
    if (life !== this.#life) return;
    this.#state = 'in';
    this.#backoffMs = firstBackoffMs;
    log.info({ tier: 'redis', blocks: this.#index.count, isNew }, 'the redis tier is in service');
    this.#poll();
  }

  async #list(): Promise<void> {
    let listed = 0;
    const onPage = (count: number): void => {
      const before = Math.floor(listed / progressEntries);
      listed += count;
      if (Math.floor(listed / progressEntries) > before) this.#options.log.info({ tier: 'redis', listed }, 'listing');
    };
    for (const directory of this.directories) {
      const before = directory.nonsense;
      await directory.list(onPage);
      await directory.poll();
      const entries = directory.nonsense - before;
      if (entries > 0) {
        const { base } = directory.partition;
        this.#options.log.warn(
          { tier: 'redis', base, entries },
          'entries that are none were removed from the directory',
        );
      }
    }
  }

  async #recover(): Promise<void> {
    this.#backoffMs = Math.min(maxBackoffMs, this.#backoffMs * 2);
    try {
      await this.#enter();
    } catch (error) {
      if (this.#state === 'closed') return;
      if (this.#state === 'listing') {
        this.fail(KvError.from(error).message);
        return;
      }
      this.#reason = KvError.from(error).message;
      this.values.disconnect(this.#reason);
      this.#later(this.#backoffMs, () => this.#recover());
    }
  }

  #poll(): void {
    this.#later(this.#options.pollMs ?? defaultPollMs, async () => {
      const life = this.#life;
      // Each to its end: two polls of one directory at once would tell old news last.
      const polls = await Promise.allSettled(this.directories.map((directory) => directory.poll()));
      const failed = polls.filter((poll) => poll.status === 'rejected');
      if (failed.length === 0) this.#refusal = '';
      this.values.leaveFormer(this.directories.map(({ partition }) => partition));
      for (const { reason } of failed) if (life === this.#life) this.commandFailed(reason);
      if (life === this.#life && this.#state === 'in') this.#poll();
    });
  }

  #later(ms: number, then: () => Promise<void>): void {
    if (this.#state === 'closed') return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#busy = then();
    }, ms);
  }
}
