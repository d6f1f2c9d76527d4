/**
 * Values between the arena and the servers, in parts: each part a key of its own. A part is written at once, and read in pieces: a
 * server takes a value in as it arrives, but sends a whole answer before anybody else gets his turn.
 *
 *     plain TCP, Unix socket ──▶ whole values, many together, in native code (NativePool)
 *     TLS, and a value that is redirected ──▶ piece by piece (PieceConnection); follows MOVED and ASK
 *
 * Invariant: a value ends once, after its last piece has; then nothing touches its slot any more, and when `move` has settled, well or
 * not, no slot of its values. One that was read was verified.
 */

import type { ArenaHandle } from '@kvtier/data-plane';
import type { HashKey, Namespace } from '@kvtier/identity';
import type { RedisAddress } from '@kvtier/redis';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import { identitiesOf, identityBytes } from '../disk/disk-io.ts';
import { settled } from '../kit/settled.ts';
import { rowsPerTurn, TurnShare } from '../kit/turn-share.ts';
import { NativePool, pieceBytes, type ValueEnd, ValueMover } from './native-pool.ts';
import { foreignCalls } from './other-users.ts';
import { type MoveResult, PieceConnection } from './piece-connection.ts';
import { PiecePool } from './piece-pool.ts';
import { addressNamed, type Partition, type RedisCommands } from './redis-commands.ts';
import type { Entry } from './replies.ts';
import type { RedisTierOptions } from './settings.ts';
import { Verifier } from './verifier.ts';

/**
 * 'none': a key is not there (expired, evicted, never reserved); 'wrong': not what its entry says; 'foreign': sound, and of a newer program;
 * 'refused': by the server.
 */
export type ValueResult = 'ok' | 'none' | 'wrong' | 'foreign' | 'lost' | 'refused';

/** A value of one partition, and its slot. */
export interface Value extends Entry {
  readonly hash: HashKey;
  readonly slot: number;
}

const maxRedirections = 4;
/** A slot that moves sends values to where it goes before the topology says so. */
const formerMs = 30_000;
/** Values of a job: what is told of together. A batch is committed when all of it is written; what is read is waited for one by one. */
const jobBytes = { get: 1 << 20, set: 64 << 20 };

type Address = RedisAddress & { readonly name: string };

interface Piece {
  readonly key: string;
  readonly view: Buffer;
  readonly start: number;
  readonly toEnd: boolean;
}

export class Values {
  readonly #commands: RedisCommands;
  readonly #arena: ArenaHandle;
  readonly #memory: ArenaMemory;
  readonly #options: RedisTierOptions;
  readonly #verifier: Verifier;
  readonly #pools = new Map<string, PiecePool>();
  readonly #natives = new Map<string, NativePool>();
  /** Of a login that has been renewed: they end what they have. */
  readonly #former = new Set<NativePool>();
  #mover: ValueMover | undefined;
  readonly #onError: (line: string) => void;
  readonly #turns = new TurnShare();
  /** When each address was last sent to, on performance.now(). */
  readonly #usedMs = new Map<string, number>();
  #isClosed = false;
  #lastError = '';

  /** `onError`: a line of the server, or why a connection ended. */
  constructor(commands: RedisCommands, options: RedisTierOptions, onError: (line: string) => void) {
    this.#commands = commands;
    this.#arena = options.arena;
    this.#memory = options.memory;
    this.#options = options;
    this.#verifier = new Verifier(options.arena);
    this.#onError = onError;
  }

  /** Move values of one partition to or from their slots. `onEnd`: a value has ended, in no order. */
  async move(
    kind: 'get' | 'set',
    partition: Partition,
    namespace: Namespace,
    values: readonly Value[],
    onEnd: (index: number, result: ValueResult) => void,
  ): Promise<void> {
    const deadlineMs = performance.now() + this.#options.settings.timeLimitMs;
    const one = async (index: number): Promise<void> => {
      onEnd(index, await this.#moveOne(kind, partition, namespace, values[index]!, deadlineMs));
    };
    if (!this.#isNative) {
      await settled(values.map((_, index) => one(index)));
      return;
    }
    const jobs = jobsOf(values, jobBytes[kind]).map(async ([first, end]) => {
      const of = values.slice(first, end);
      const hashes = of.map(({ hash }) => hash);
      const identities = kind === 'get' ? identitiesOf(namespace, hashes) : null;
      const ends = await this.#moveWhole(kind, partition, of, identities, deadlineMs);
      const redirected: number[] = [];
      for (let index = first; index < end; index++) {
        // What was written is told of as one.
        if (kind === 'get' && (index - first) % rowsPerTurn === 0)
          await this.#turns.take(Math.min(rowsPerTurn, end - index));
        const result = ends === 'lost' ? 'lost' : ends[index - first]!;
        if (typeof result !== 'object') onEnd(index, result === 'length' || result === 'fault' ? 'wrong' : result);
        else if (!isRedirection(result.error)) onEnd(index, this.#refusal(result.error));
        else {
          if (result.error.startsWith('MOVED')) this.#commands.refreshTopology();
          redirected.push(index);
        }
      }
      await settled(redirected.map(one));
    });
    await settled(jobs);
  }

  async #moveOne(
    kind: 'get' | 'set',
    partition: Partition,
    namespace: Namespace,
    value: Value,
    deadlineMs: number,
  ): Promise<ValueResult> {
    const result = await this.#movePieces(kind, partition, value, deadlineMs);
    if (kind === 'set' || result !== 'ok') return result;
    const verdict = await this.#verifier.verdict(namespace, value.hash, value.slot, value.bytes);
    return verdict === 'sound' ? 'ok' : verdict;
  }

  /** Can values be reached, with these credentials? KvError-free: 'ok', or why not. */
  async probe(partition: Partition): Promise<string> {
    const deadlineMs = performance.now() + this.#options.settings.timeLimitMs;
    this.#lastError = 'no answer within the time limit';
    const tryOut = async (kind: 'get' | 'set'): Promise<ValueResult> => {
      if (this.#isNative) {
        const identities = kind === 'get' ? Buffer.alloc(identityBytes) : null;
        const value = { bytes: 0, partBytes: 1, id: 'probe', slot: 0 };
        const ends = await this.#moveWhole(kind, partition, [value], identities, deadlineMs);
        const end = ends === 'lost' ? 'lost' : ends[0]!;
        if (end === 'none') return 'none';
        if (typeof end !== 'object') return 'lost';
        if (!isRedirection(end.error)) return this.#refusal(end.error);
      }
      return new Promise((resolve) => {
        const piece = { key: `${partition.base}v:probe:0`, view: Buffer.alloc(0), start: 0, toEnd: true };
        this.#submit(kind, partition, piece, deadlineMs, resolve, 0, undefined);
      });
    };
    if ((await tryOut('get')) !== 'none') return this.#lastError;
    // A server that takes no writes now can be read.
    return ['none', 'refused'].includes(await tryOut('set')) ? 'ok' : this.#lastError;
  }

  /** Every connection is destroyed, and all that moved has ended, when this returns. */
  disconnect(reason: string): void {
    const pools = [...this.#pools.values(), ...this.#natives.values(), ...this.#former];
    this.#pools.clear();
    this.#natives.clear();
    this.#former.clear();
    this.#usedMs.clear();
    for (const pool of pools) pool.close(reason);
  }

  /**
   * Connections to addresses where no partition is any more go, when nothing was sent there for a while: a Cluster's come and go. And those
   * with a former login, when nothing moves there.
   */
  leaveFormer(partitions: readonly Partition[], nowMs = performance.now()): void {
    for (const pool of this.#former) {
      if (!pool.idle) continue;
      this.#former.delete(pool);
      pool.close('its login was renewed');
    }
    if (this.#usedMs.size <= 1) return;
    const current = new Set(partitions.map((each) => this.#commands.address(each)?.name));
    for (const [name, usedMs] of this.#usedMs) {
      if (current.has(name) || nowMs - usedMs < formerMs) continue;
      const pools = [this.#pools.get(name), this.#natives.get(name)];
      if (pools.some((pool) => pool?.idle === false)) continue;
      for (const pool of pools) pool?.close('its server is in use no more');
      this.#pools.delete(name);
      this.#natives.delete(name);
      this.#usedMs.delete(name);
    }
  }

  /** The end: what is moved afterwards is 'lost'. */
  close(): void {
    this.disconnect('closed');
    this.#isClosed = true;
    this.#mover?.close();
    this.#mover = undefined;
  }

  get #isNative(): boolean {
    return this.#commands.login.tls === undefined && this.#options.transport !== 'node';
  }

  #moveWhole(
    kind: 'get' | 'set',
    partition: Partition,
    values: readonly Omit<Value, 'hash'>[],
    identities: Uint8Array | null,
    deadlineMs: number,
  ): Promise<'lost' | readonly ValueEnd[]> {
    const address = this.#commands.address(partition);
    if (address === undefined || this.#isClosed) return Promise.resolve('lost');
    const rows = new Float64Array(3 * values.length);
    let ids = '';
    for (const [i, { bytes, partBytes, id, slot }] of values.entries()) {
      rows[3 * i] = slot;
      rows[3 * i + 1] = bytes;
      rows[3 * i + 2] = partBytes;
      ids += i === 0 ? id : ` ${id}`;
    }
    return new Promise((onDone) => {
      const base = `${partition.base}v:`;
      this.#poolTo(address, partition).submit({ kind, base, ids, rows, identities, deadlineMs, onDone });
    });
  }

  #movePieces(
    kind: 'get' | 'set',
    partition: Partition,
    { bytes, partBytes, id, slot }: Value,
    deadlineMs: number,
  ): Promise<ValueResult> {
    const pieces: Piece[] = [];
    for (let at = 0, part = 0; at < bytes; at += partBytes, part++) {
      const key = `${partition.base}v:${id}:${part}`;
      const length = Math.min(partBytes, bytes - at);
      const step = kind === 'set' ? length : pieceBytes;
      for (let start = 0; start < length; start += step) {
        const view = this.#memory.view(slot + at + start, Math.min(step, length - start));
        pieces.push({ key, view, start, toEnd: start + step >= length });
      }
    }
    return new Promise((resolve) => {
      let open = pieces.length;
      let worst: ValueResult = 'ok';
      const end = (result: ValueResult): void => {
        // A value that is too short has pieces that are not there.
        if (worst === 'ok' || result === 'wrong') worst = result === 'ok' ? worst : result;
        if (--open === 0) resolve(worst);
      };
      for (const piece of pieces) this.#submit(kind, partition, piece, deadlineMs, end, 0, undefined);
    });
  }

  #submit(
    kind: 'get' | 'set',
    partition: Partition,
    piece: Piece,
    deadlineMs: number,
    end: (result: ValueResult) => void,
    redirections: number,
    target: (Address & { readonly asking: boolean }) | undefined,
  ): void {
    const address = target ?? this.#commands.address(partition);
    if (address === undefined || this.#isClosed) {
      end('lost');
      return;
    }
    const onDone = (result: MoveResult): void => {
      if (typeof result !== 'object') {
        end(result === 'length' ? 'wrong' : result);
        return;
      }
      const [word, , place] = result.error.split(' ');
      if (isRedirection(result.error) && redirections < maxRedirections && performance.now() < deadlineMs) {
        if (word === 'MOVED') this.#commands.refreshTopology();
        const named = addressNamed(place!);
        // An empty host: the server that answered.
        const next = { ...named, host: named.host === '' ? address.host : named.host, asking: word === 'ASK' };
        this.#submit(kind, partition, piece, deadlineMs, end, redirections + 1, next);
        return;
      }
      end(this.#refusal(result.error));
    };
    this.#pool(address).submit({ kind, ...piece, deadlineMs, asking: target?.asking ?? false, onDone });
  }

  #pool(address: Address): PiecePool {
    this.#usedMs.set(address.name, performance.now());
    let pool = this.#pools.get(address.name);
    if (pool === undefined) {
      const { connections, depth } = this.#options.settings;
      const connect = (on: ConstructorParameters<typeof PieceConnection>[2]) =>
        new PieceConnection(address, this.#commands.login, on);
      pool = new PiecePool({ connect, connections, depth, onFailure: (reason) => this.#note(reason) });
      this.#pools.set(address.name, pool);
    }
    return pool;
  }

  #poolTo(address: Address, partition: Partition): NativePool {
    this.#usedMs.set(address.name, performance.now());
    let natives = this.#natives.get(address.name);
    const { login } = this.#commands;
    if (natives === undefined || natives.login !== login) {
      if (natives !== undefined) this.#former.add(natives);
      this.#mover ??= new ValueMover(this.#arena);
      const { connections, depth } = this.#options.settings;
      const onFailure = (reason: string): void => this.#note(reason);
      const foreign = async (): Promise<number> =>
        foreignCalls(String(await this.#commands.command(partition, 'INFO', ['commandstats'])));
      const options = { address, login, connections, depth, onFailure, foreignCalls: foreign };
      natives = new NativePool(this.#mover, options);
      this.#natives.set(address.name, natives);
    }
    return natives;
  }

  #refusal(line: string): ValueResult {
    this.#note(line);
    return /^(OOM|MISCONF|NOREPLICAS)/.test(line) ? 'refused' : 'lost';
  }

  #note(line: string): void {
    this.#lastError = line;
    this.#onError(line);
  }
}

const isRedirection = (line: string): boolean => /^(MOVED|ASK) \d+ \S/.test(line);

/** [first, end) of each job: of so many bytes, or one value. */
function jobsOf(values: readonly Value[], maxBytes: number): [number, number][] {
  const jobs: [number, number][] = [];
  let filled = 0;
  for (const [index, { bytes }] of values.entries()) {
    filled += bytes;
    const last = jobs.at(-1);
    if (last !== undefined && filled <= maxBytes) last[1] = index + 1;
    else {
      jobs.push([index, index + 1]);
      filled = bytes;
    }
  }
  return jobs;
}
