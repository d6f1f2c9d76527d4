/**
 * The tier's life with its servers: connect, list, follow; out of service when the world breaks them, back with a backoff. In a Cluster
 * it is out when all its partitions are; a single one goes and comes back by itself.
 *
 *     starting ──▶ listing ──▶ in service ──(lost, timeout, no ledger)──▶ out ──backoff──▶ listing ...
 *
 * Invariant: out of service the index is empty and no connection for values exists, so that nothing can arrive in a slot.
 */
import { invariant, KvError } from '@kvtier/errors';
import { Directory, NewerDirectory } from './directory.ts';
import { Partitions } from './partitions.ts';
import { RedisCommands } from './redis-commands.ts';
import type { RedisIndex } from './redis-index.ts';
import type { RedisTierOptions } from './settings.ts';
import { Values } from './values.ts';

type State = 'starting' | 'listing' | 'in' | 'out' | 'closed';

const defaultPollMs = 200;
const firstBackoffMs = 100;
const maxBackoffMs = 5000;

/** The last three: a slot of a Cluster moves, sent here and there meanwhile, and with it one partition; the others go on. */
const isOfOneCommand = /\b(OOM|MISCONF|NOREPLICAS|TRYAGAIN|redirections\. Last error: \w+: (MOVED|ASK))\b/;

export class RedisService {
  readonly #options: RedisTierOptions;
  readonly #index: RedisIndex;
  readonly #commands: RedisCommands;
  readonly values: Values;
  readonly directories: readonly Directory[];
  readonly #partitions: Partitions;
  #state: State = 'starting';
  #reason = 'starting';
  #timer: NodeJS.Timeout | undefined;
  #backoffMs = firstBackoffMs;
  /** Grows with every loss: what began before it is over. */
  #life = 0;
  #busy: Promise<void> = Promise.resolve();
  #entering: Promise<void> = Promise.resolve();
  /** It has been in service: what cannot work at one server of a Cluster since then keeps the others out no more. */
  #wasIn = false;
  /** Partitions that are out are tried again. */
  #mendTimer: NodeJS.Timeout | undefined;
  #mendBackoffMs = firstBackoffMs;
  #isMending = false;
  #mending: Promise<void> = Promise.resolve();
  /** Those whose changes are asked for now. */
  readonly #polling = new Map<Directory, Promise<boolean>>();
  /** Why the server last refused a command that it may take later. */
  #refusal = '';
  connectionsLost = 0;

  /** KvError CONFIG for what cannot work. */
  constructor(
    options: RedisTierOptions,
    index: RedisIndex,
    node: string,
    connect = (onLost: (reason: string) => void): RedisCommands => new RedisCommands(options.settings, onLost),
  ) {
    this.#options = options;
    this.#index = index;
    this.#commands = connect((reason) => this.fail(reason));
    this.values = new Values(this.#commands, options, (line) => {
      this.connectionsLost++;
      if (this.#state === 'in') options.log.warn({ tier: 'redis', reason: line }, 'a transfer broke');
    });
    this.directories = this.#commands.partitions().map((each) => new Directory(each, this.#commands, index, node));
    this.#partitions = new Partitions(options, index, this.#commands, this.values, this.directories);
  }

  get inService(): boolean {
    return this.#state === 'in';
  }

  /** Commands may be sent. */
  get reachable(): boolean {
    return this.#state === 'in' || this.#state === 'listing';
  }

  /** In service, and so is this partition. */
  isIn(directory: Directory): boolean {
    return this.#state === 'in' && this.#partitions.isIn(directory);
  }

  /** Of the tier, or of those of its partitions that are out while it is in service. */
  get outOfServiceReason(): string {
    return this.#state === 'in' ? this.#partitions.reason : this.#reason;
  }

  get partitionsOut(): number {
    return this.#partitions.outCount;
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

  /** A command of a partition did not end well: some reasons are about that command alone. */
  commandFailed(error: unknown, directory: Directory): void {
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
    if (this.#options.settings.mode === 'cluster') this.#partitionFailed(directory, error);
    else this.fail(error.message);
  }

  async close(): Promise<void> {
    this.#state = 'closed';
    this.#reason = 'closed';
    this.#life++;
    clearTimeout(this.#timer);
    clearTimeout(this.#mendTimer);
    this.#partitions.endAll('closed');
    this.values.close();
    this.#commands.close();
    await Promise.all([this.#busy, this.#mending, this.#entering.catch(() => {})]); // who began it was told
    await Promise.all(this.#polling.values());
    await this.#partitions.close();
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
    clearTimeout(this.#mendTimer);
    this.#mendTimer = undefined;
    this.#partitions.endAll(reason);
    this.values.disconnect(reason);
    this.#commands.reset();
    this.#index.clear();
  }

  /** A server of a Cluster: what it has is out, and the rest goes on. */
  #partitionFailed(directory: Directory, error: KvError): void {
    const { log } = this.#options;
    // While all is listed, its own listing tells.
    if (!this.isIn(directory)) return;
    const { base } = directory.partition;
    this.#partitions.leave(directory, error);
    if (this.#partitions.outCount === this.directories.length) {
      this.fail(error.message);
      return;
    }
    log.warn({ tier: 'redis', base, reason: error.message }, 'a partition is out of service');
    this.#mendSoon();
  }

  /** One at a time: what was begun before a loss ends soon, as all that it had opened has ended. */
  #enter(): Promise<void> {
    const before = Promise.allSettled([this.#entering, this.#mending]).then(() => this.#partitions.mended());
    this.#entering = before.then(() => this.#enterNow());
    return this.#entering;
  }

  async #enterNow(): Promise<void> {
    const { settings, log } = this.#options;
    const life = this.#life;
    await this.#commands.ready(settings.timeLimitMs);
    await this.#commands.loadScripts(!this.#wasIn);
    if (life !== this.#life) return;
    const { directories, isNew, failed } = await this.#partitions.open(!this.#wasIn);
    this.#mayGoOn(failed);
    if (life !== this.#life) return;
    // From here on losses empty the index again.
    this.#state = 'listing';
    this.#reason = 'listing what is there';
    this.#mayGoOn(await this.#partitions.list(directories));
    if (life !== this.#life) return;
    this.#state = 'in';
    this.#wasIn = true;
    this.#backoffMs = firstBackoffMs;
    log.info({ tier: 'redis', blocks: this.#index.count, isNew }, 'the redis tier is in service');
    this.#poll();
    if (this.#partitions.outCount === 0) return;
    log.warn({ tier: 'redis', reason: this.#partitions.reason }, 'some partitions are out of service');
    this.#mendSoon();
  }

  /**
   * What waiting does not mend is thrown of a configuration that has not worked yet, what leaves nothing to be in service, and a newer
   * program's directory; servers of a Cluster may come later.
   */
  #mayGoOn(failed: readonly KvError[]): void {
    const [first] = failed;
    if (first === undefined) return;
    const newer = failed.find((error) => error instanceof NewerDirectory);
    if (newer !== undefined) throw newer;
    const lasting = failed.find(({ retry }) => !retry);
    if (!this.#wasIn && lasting !== undefined) throw lasting;
    const { mode } = this.#options.settings;
    if (mode !== 'cluster' || this.directories.every(({ isOpen }) => !isOpen)) throw lasting ?? first;
  }

  /** One has just gone: it may be back at once, however long others have been away. */
  #mendSoon(): void {
    this.#mendBackoffMs = firstBackoffMs;
    clearTimeout(this.#mendTimer);
    this.#mendTimer = undefined;
    this.#mendLater();
  }

  #mendLater(): void {
    if (this.#mendTimer !== undefined || this.#isMending) return;
    this.#mendTimer = setTimeout(() => {
      this.#mendTimer = undefined;
      this.#mending = this.#mend();
    }, this.#mendBackoffMs);
  }

  /** Those that are out are tried again, while the others go on. */
  async #mend(): Promise<void> {
    if (this.#partitions.outCount === 0) return;
    const life = this.#life;
    this.#isMending = true;
    this.#mendBackoffMs = Math.min(maxBackoffMs, this.#mendBackoffMs * 2);
    await this.#commands.topologyRefreshed();
    this.#isMending = false;
    if (life !== this.#life) return;
    this.#partitions.mend((directory) => {
      if (!this.isIn(directory)) return;
      const { base } = directory.partition;
      this.#options.log.info({ tier: 'redis', base }, 'a partition is in service again');
    });
    this.#mendLater();
  }

  async #recover(): Promise<void> {
    const life = this.#life;
    this.#backoffMs = Math.min(maxBackoffMs, this.#backoffMs * 2);
    try {
      await this.#enter();
    } catch (error) {
      if (life !== this.#life) return; // whoever lost it meanwhile tries again, or it is closed
      if (this.#state === 'listing') {
        this.fail(KvError.from(error).message);
        return;
      }
      this.#reason = KvError.from(error).message;
      this.#partitions.endAll(this.#reason);
      if (this.#index.count > 0) this.#index.clear();
      this.values.disconnect(this.#reason);
      this.#later(this.#backoffMs, () => this.#recover());
    }
  }

  /** Those that have not answered yet sit out a round: two polls of one at once would tell old news last, and no other waits for it. */
  #poll(): void {
    this.#later(this.#options.pollMs ?? defaultPollMs, async () => {
      const asked = this.directories.filter((each) => this.isIn(each) && !this.#polling.has(each));
      for (const directory of asked) this.#polling.set(directory, this.#pollOne(directory));
      void Promise.all(asked.map((each) => this.#polling.get(each))).then((answers) => {
        if (answers.length > 0 && answers.every((isAnswered) => isAnswered)) this.#refusal = '';
      });
      this.values.leaveFormer(this.directories.map(({ partition }) => partition));
      this.#poll();
    });
  }

  /** Returns whether it was answered. */
  async #pollOne(directory: Directory): Promise<boolean> {
    const life = this.#life;
    try {
      await directory.poll();
      return true;
    } catch (error) {
      if (life === this.#life) this.commandFailed(error, directory);
      return false;
    } finally {
      this.#polling.delete(directory);
    }
  }

  #later(ms: number, then: () => Promise<void>): void {
    if (this.#state === 'closed') return;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => {
      this.#busy = then();
    }, ms);
  }
}
