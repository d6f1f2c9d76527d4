/**
 * The Redis tier: one pool of blocks for all nodes that share the servers, under one budget.
 *
 *     write ──reserve (Lua)──▶ parts: arena ──PieceConnection──▶ server ──commit (Lua)──▶ listed, told to all
 *     read  ──RedisIndex──▶ parts: server ──PieceConnection──▶ arena slot ──▶ verified in native code
 *     poll  ──▶ what other nodes stored and removed ──▶ RedisIndex ──▶ followers
 *
 * Invariants (law 1, 2, 3): what is delivered was verified against namespace, hash, length and both checksums; space is reserved
 * on the server before a byte is written, and a reservation whose node died ends by itself; a server that is gone, slow or has
 * lost its data costs misses, and is tried again with a backoff.
 */
import { randomBytes } from 'node:crypto';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { expiresOffset, type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import { systemClock } from '@kvtier/runtime';
import { identitiesOf } from '../disk/disk-io.ts';
import { settled } from '../kit/settled.ts';
import type {
  Following,
  ReadStatus,
  RemoveReason,
  SlotBlock,
  SlotSizes,
  Tier,
  TierChange,
  TierStats,
  WriteStatus,
} from '../kit/tier.ts';
import type { Answer, Commitment, Directory, Reservation } from './directory.ts';
import { partitionOf } from './partitions.ts';
import { ServerRecency } from './recency.ts';
import { RedisIndex } from './redis-index.ts';
import { maxParts, parseEntry } from './replies.ts';
import { RedisService } from './service.ts';
import { policyOf, type RedisTierOptions } from './settings.ts';
import type { Value, ValueResult } from './values.ts';
import { WriteBatches } from './write-batches.ts';

const defaultMaxPendingBytes = 256 << 20;
const defaultLeaseMs = 60_000;
/** Where a header has its parent's length and name: docs/formats.md. */
const parentAt = { length: 14, hash: 80 };
const payloadBytesAt = 120;

interface Job extends Reservation {
  /** In #writing. */
  readonly key: string;
  readonly parent: HashKey | undefined;
  readonly slot: number;
  /** Of the object (`Header.expiresS`). */
  readonly expiresS: number;
  readonly tell: (answer: Answer) => void;
}

export class RedisTier implements Tier {
  readonly name = 'redis';
  readonly supports = { persistent: true, shared: true, writable: true, evicts: true };
  readonly #options: RedisTierOptions;
  readonly #node = randomBytes(9).toString('base64url');
  readonly #index = new RedisIndex();
  readonly #service: RedisService;
  readonly #recency: ServerRecency;
  readonly #batches: ReadonlyMap<Directory, WriteBatches<Job>>;
  /** Writes in flight by namespace and hash, with who else waits for them. */
  readonly #writing = new Map<string, ((stored: boolean) => void)[]>();
  readonly #inFlight = new Set<Promise<unknown>>();
  readonly #counts = { hits: 0, misses: 0, evictions: 0, corrupt: 0, refused: 0 };
  readonly #detail = { foreign_blocks: 0, vanished: 0, transfers_lost: 0, full: 0 };
  #pendingBytes = 0;
  #nextValue = 0;

  /** Connect, and list what is there. KvError CONFIG for what cannot work; else retry is true: the server is not there now. */
  static async open(options: RedisTierOptions): Promise<RedisTier> {
    const tier = new RedisTier(options);
    try {
      await tier.#service.start();
    } catch (error) {
      if (options.openWithoutServer === true && error instanceof KvError && error.retry) {
        tier.#service.startLater(error.message);
        return tier;
      }
      await tier.close();
      throw error;
    }
    return tier;
  }

  private constructor(options: RedisTierOptions) {
    this.#options = options;
    this.#service = new RedisService(options, this.#index, this.#node);
    this.#recency = new ServerRecency(this.#index, this.#service);
    const batchesOf = (directory: Directory): WriteBatches<Job> =>
      new WriteBatches((namespace, jobs) => this.#writeBatch(namespace, directory, jobs));
    this.#batches = new Map(this.#service.directories.map((directory) => [directory, batchesOf(directory)]));
  }

  lookup(namespace: Namespace, hashes: readonly HashKey[]): number {
    const held = this.#index.prefix(namespace, hashes);
    this.#counts.hits += held;
    if (held < hashes.length) this.#counts.misses++;
    return held;
  }

  touch(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#recency.touch(namespace, hashes);
  }

  async write(namespace: Namespace, blocks: readonly SlotBlock[]): Promise<WriteStatus[]> {
    const names = blocks.map(({ hash }) => hash);
    const slots = Float64Array.from(blocks, ({ slot }) => slot);
    const sizes = native.arenaObjects(this.#options.arena, slots, identitiesOf(namespace, names));
    const policy = policyOf(this.#options.settings.policies, namespace);
    const statuses = blocks.map((): WriteStatus => 'refused');
    const jobs = new Map<Directory, Job[]>();
    const waits: Promise<void>[] = [];
    for (const [index, { hash, slot }] of blocks.entries()) {
      if (sizes[index] === 0) continue;
      const key = namespace.key + hash;
      const others = this.#writing.get(key);
      if (this.#index.get(namespace, hash) !== undefined) {
        statuses[index] = 'held';
        this.#recency.touch(namespace, [hash]);
      } else if (others !== undefined) {
        waits.push(
          new Promise((resolve) => {
            others.push((stored) => {
              if (stored) statuses[index] = 'held';
              resolve();
            });
          }),
        );
      } else if (this.#mayWrite(namespace, hash) && policy.readOnly !== true) {
        const tell = (answer: Answer): void => {
          statuses[index] = answer === 'done' ? 'stored' : answer;
        };
        const job = this.#jobOf(key, hash, slot, tell);
        if (!this.#admit(job.bytes)) continue;
        this.#writing.set(key, []);
        const directory = this.#directoryOf(hash);
        const list = jobs.get(directory);
        if (list === undefined) jobs.set(directory, [job]);
        else list.push(job);
      }
    }
    for (const [directory, list] of jobs) {
      waits.push(this.#track(this.#batches.get(directory)!.add(namespace, list)));
    }
    await Promise.all(waits);
    for (const status of statuses) if (status === 'refused') this.#counts.refused++;
    return statuses;
  }

  async read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes: SlotSizes = 'known',
  ): Promise<void> {
    await this.#track(this.#read(namespace, blocks, onDone, sizes));
  }

  remove(namespace: Namespace, hashes: readonly HashKey[], reason: RemoveReason): number {
    const gone = new Map<Directory, { hash: HashKey; text: string }[]>();
    let count = 0;
    for (const hash of hashes) {
      const entry = this.#index.get(namespace, hash);
      if (entry === undefined) continue;
      this.#index.remove(namespace, hash);
      count++;
      if (reason === 'corrupt') this.#counts.corrupt++;
      if (reason === 'evicted') this.#counts.evictions++;
      if (reason === 'foreign') this.#detail.foreign_blocks++;
      const directory = this.#directoryOf(hash);
      if (reason === 'foreign') directory.passOver(namespace, hash, entry.text);
      // Others may know it as it is: it is unlisted here alone, or this node would say that it is held, and make its name nowhere. Told
      // anew of one that does not fit, this node lists it until it is read again.
      if (reason === 'misfit' || reason === 'foreign') continue;
      const list = gone.get(directory);
      if (list === undefined) gone.set(directory, [{ hash, text: entry.text }]);
      else list.push({ hash, text: entry.text });
    }
    for (const [directory, list] of gone) {
      if (!this.#service.reachable || !directory.isOpen) continue;
      const removed = directory.remove(namespace, list);
      void this.#track(removed.catch((error: unknown) => this.#service.commandFailed(error, directory)));
    }
    return count;
  }

  follow(listener: (change: TierChange) => void): () => void {
    return this.#index.follow(listener);
  }

  followInPages(listener: (change: TierChange) => void): Following {
    return this.#index.followInPages(listener);
  }

  stats(): TierStats {
    const { directories, inService, outOfServiceReason, connectionsLost, partitionsOut } = this.#service;
    const sum = (of: (directory: Directory) => number): number => directories.reduce((all, each) => all + of(each), 0);
    return {
      tier: this.name,
      blocks: this.#index.count,
      bytes: sum(({ usedBytes }) => usedBytes),
      capacityBytes: directories.length === 0 ? this.#options.settings.bytes : sum((each) => each.capacityBytes),
      ...this.#counts,
      inService,
      outOfServiceReason,
      detail: {
        ...this.#detail,
        partitions_out: partitionsOut,
        connections_lost: connectionsLost,
        touches_dropped: this.#recency.dropped,
        nonsense: sum(({ nonsense }) => nonsense),
      },
    };
  }

  checkIntegrity(): void {
    this.#index.checkIntegrity();
    this.#service.checkIntegrity();
  }

  async close(): Promise<void> {
    await Promise.all(this.#inFlight);
    await this.#recency.flush().known;
    await this.#service.close();
  }

  #track<T>(promise: Promise<T>): Promise<T> {
    this.#inFlight.add(promise);
    const done = (): void => {
      this.#inFlight.delete(promise);
    };
    promise.then(done, done);
    return promise;
  }

  #directoryOf(hash: HashKey): Directory {
    const { directories } = this.#service;
    return directories[partitionOf(hash, directories.length)]!;
  }

  /** A newer program's ages and goes, and its name is free: not while this node asks for its room again and again. */
  #mayWrite(namespace: Namespace, hash: HashKey): boolean {
    const directory = this.#directoryOf(hash);
    return this.#service.isIn(directory) && !directory.isForeign(namespace, hash);
  }

  #jobOf(key: string, hash: HashKey, slot: number, tell: Job['tell']): Job {
    const header = this.#options.memory.view(slot, headerBytes);
    const bytes = headerBytes + Number(header.readBigUInt64LE(payloadBytesAt));
    const parentLength = header.readUInt16LE(parentAt.length);
    const parent =
      parentLength === 0
        ? undefined
        : (header.toString('latin1', parentAt.hash, parentAt.hash + parentLength) as HashKey);
    const expiresS = header.readUInt32LE(expiresOffset);
    return { key, hash, slot, parent, tell, bytes, expiresS, id: `${this.#node}.${(this.#nextValue++).toString(36)}` };
  }

  #admit(bytes: number): boolean {
    if (this.#pendingBytes + bytes > (this.#options.maxPendingBytes ?? defaultMaxPendingBytes)) return false;
    if (bytes > maxParts * this.#options.settings.partBytes) return false;
    this.#pendingBytes += bytes;
    return true;
  }

  /** Blocks of one partition: reserved, sent, listed. Never throws for what the world does. */
  async #writeBatch(namespace: Namespace, directory: Directory, jobs: readonly Job[]): Promise<void> {
    let answers: readonly Answer[] = jobs.map(() => 'refused');
    try {
      if (this.#service.isIn(directory)) answers = await this.#store(namespace, directory, jobs);
    } catch (error) {
      this.#service.commandFailed(error, directory);
    }
    for (const [i, job] of jobs.entries()) {
      const answer = answers[i]!;
      job.tell(answer);
      this.#pendingBytes -= job.bytes;
      const waiters = this.#writing.get(job.key)!;
      this.#writing.delete(job.key);
      for (const tell of waiters) tell(answer !== 'refused');
    }
  }

  async #store(namespace: Namespace, directory: Directory, jobs: readonly Job[]): Promise<readonly Answer[]> {
    const { settings, onStep, leaseMs, clock = systemClock } = this.#options;
    const { partBytes } = settings;
    const policy = policyOf(settings.policies, namespace);
    const { sent } = this.#recency.flush(); // sent before the reservation, which evicts by it
    if (sent !== undefined) {
      await sent;
      if (!this.#service.isIn(directory)) return jobs.map(() => 'refused');
    }
    const terms = { leaseMs: leaseMs ?? defaultLeaseMs, partBytes, share: policy.maxShare };
    const { answers, evicted } = await directory.reserve(namespace, jobs, terms);
    this.#counts.evictions += evicted;
    onStep?.('redis.write.reserved');
    const roomy = jobs.filter((_, i) => answers[i] === 'done');
    for (const answer of answers) if (answer === 'refused') this.#detail.full++;
    const values = roomy.map(({ bytes, hash, id, slot }): Value => ({ bytes, partBytes, id, hash, slot }));
    const written = roomy.map(() => false);
    await this.#service.values.move('set', directory.partition, namespace, values, (i, result) => {
      written[i] = result === 'ok';
      if (result === 'lost') this.#detail.transfers_lost++;
    });
    onStep?.('redis.write.parts');
    if (roomy.length === 0) return answers;
    const uses = this.#recency.usesOf(namespace, roomy);
    const reserved = roomy.map((job, i): Commitment => {
      // When that time comes the server removes the block, whichever nodes are there then.
      const ttlMs = ttlMsOf(policy.ttlSeconds, job.expiresS, clock.wallMs());
      return { hash: job.hash, id: job.id, bytes: job.bytes, written: written[i]!, usedUs: uses[i]!, ttlMs };
    });
    const committed = await directory.commit(namespace, reserved, partBytes);
    onStep?.('redis.write.committed');
    let next = 0;
    return answers.map((answer) => (answer === 'done' ? committed[next++]! : answer));
  }

  async #read(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    onDone: (index: number, status: ReadStatus) => void,
    sizes: SlotSizes,
  ): Promise<void> {
    await Promise.resolve(); // nothing is told before the caller has its promise
    const wanted = new Map<Directory, (Value & { readonly index: number; readonly text: string })[]>();
    for (const [index, { hash, slot }] of blocks.entries()) {
      const entry = this.#index.get(namespace, hash);
      if (entry === undefined) {
        onDone(index, 'missing');
        continue;
      }
      const directory = this.#directoryOf(hash);
      // Its partition is out, and all of it is about to be unlisted.
      if (!directory.isOpen) {
        this.#index.remove(namespace, hash);
        onDone(index, 'missing');
        continue;
      }
      const { text } = entry;
      const { bytes, partBytes, id } = parseEntry(text)!; // the index has no other
      if (bytes > this.#options.slots.slotBytesOf(slot)) {
        if (sizes === 'known') this.remove(namespace, [hash], 'misfit');
        onDone(index, 'missing');
        continue;
      }
      const list = wanted.get(directory);
      const value = { index, text, bytes, partBytes, id, hash, slot };
      if (list === undefined) wanted.set(directory, [value]);
      else list.push(value);
    }
    const moves = [...wanted].map(([{ partition }, values]) =>
      this.#service.values.move('get', partition, namespace, values, (i, result) => {
        onDone(values[i]!.index, this.#ended(namespace, values[i]!, result));
      }),
    );
    await settled(moves);
  }

  /** A read has ended: what it says about the block. */
  #ended(namespace: Namespace, { text, hash }: { text: string; hash: HashKey }, result: ValueResult): ReadStatus {
    if (result === 'ok') return 'ready';
    if (result === 'lost' || result === 'refused') {
      this.#detail.transfers_lost++;
      return 'failed';
    }
    if (result === 'none') this.#detail.vanished++; // evicted by another node, expired, or the server forgot it
    // Unless it has a new value by now.
    const isSame = this.#index.get(namespace, hash)?.text === text;
    if (isSame) this.remove(namespace, [hash], reasons[result]);
    else if (result === 'wrong') this.#counts.corrupt++;
    if (result === 'wrong') {
      const error = new KvError('CORRUPT', `redis: value ${text} did not match its header; it was removed`);
      this.#options.log.warn({ tier: this.name, reason: error.message }, 'a corrupt block was removed');
      return 'corrupt';
    }
    return 'missing';
  }
}

/** Of a removal, by what a read came to. */
const reasons = { wrong: 'corrupt', foreign: 'foreign', none: 'asked' } as const;

/** What is left of a policy's and of an object's own time to live, whichever is shorter; undefined: neither has one. */
function ttlMsOf(policySeconds: number | undefined, expiresS: number, wallMs: number): number | undefined {
  const own = expiresS === 0 ? Number.POSITIVE_INFINITY : Math.max(1, expiresS * 1000 - wallMs);
  const ttlMs = Math.min(own, (policySeconds ?? Number.POSITIVE_INFINITY) * 1000);
  return ttlMs === Number.POSITIVE_INFINITY ? undefined : ttlMs;
}
