/**
 * Values between the arena and the servers, in parts: each part a key of its own. A part is written at once, and read in pieces: a
 * server takes a value in as it arrives, but sends a whole answer before anybody else gets his turn.
 *
 *     plain TCP, Unix socket ──▶ whole values, in native code (BulkLane)
 *     TLS, and a value that is redirected ──▶ piece by piece (BulkConnection); follows MOVED and ASK
 *
 * Invariant: a value ends once, after its last piece has; then nothing touches its slot any more. One that was read was verified.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import type { ArenaHandle } from '@kvtier/native';
import type { ArenaMemory } from '../arena-memory.ts';
import { identitiesOf, identityBytes } from '../disk/disk-io.ts';
import { type BulkAddress, BulkConnection, type BulkJob, type BulkResult } from './bulk-connection.ts';
import { BulkEngine, BulkLane, pieceBytes, type ValueJob } from './bulk-lane.ts';
import { BulkPool } from './bulk-pool.ts';
import { parseEntry } from './directory.ts';
import { addressNamed, type Partition, type RedisLink } from './link.ts';
import type { RedisTierOptions } from './settings.ts';
import { Verifier } from './verifier.ts';

/** 'none': a key is not there (expired, evicted, never reserved); 'wrong': not what its entry says; 'refused': by the server. */
export type ValueResult = 'ok' | 'none' | 'wrong' | 'lost' | 'refused';

/** Whose value it is, and which: `text` is the directory's entry. */
export interface Value {
  readonly partition: Partition;
  readonly text: string;
  readonly namespace: Namespace;
  readonly hash: HashKey;
}

const maxRedirections = 4;
/** Values on one lane: while the last pieces of one are awaited, those of the next are on their way. */
const laneValues = 2;

type Address = BulkAddress & { readonly name: string };

interface Piece {
  readonly key: string;
  readonly view: Buffer;
  readonly start: number;
  readonly toEnd: boolean;
}

export class Values {
  readonly #link: RedisLink;
  readonly #arena: ArenaHandle;
  readonly #memory: ArenaMemory;
  readonly #options: RedisTierOptions;
  readonly #verifier: Verifier;
  readonly #pools = new Map<string, BulkPool>();
  readonly #lanes = new Map<string, BulkPool<ValueJob>>();
  #engine: BulkEngine | undefined;
  readonly #onError: (line: string) => void;
  #isClosed = false;
  #lastError = '';

  /** `onError`: a line of the server, or why a connection ended. */
  constructor(link: RedisLink, options: RedisTierOptions, onError: (line: string) => void) {
    this.#link = link;
    this.#arena = options.arena;
    this.#memory = options.memory;
    this.#options = options;
    this.#verifier = new Verifier(options.arena);
    this.#onError = onError;
  }

  /** Move a value to or from a slot. */
  async move(kind: 'get' | 'set', value: Value, slot: number): Promise<ValueResult> {
    const deadlineMs = performance.now() + this.#options.settings.timeLimitMs;
    const { namespace, hash, text, partition } = value;
    if (this.#isNative) {
      const identity = kind === 'get' ? identitiesOf(namespace, [hash]) : null;
      const result = await this.#moveWhole(partition, text, slot, identity, deadlineMs);
      if (typeof result !== 'object') return result === 'length' || result === 'fault' ? 'wrong' : result;
      if (!isRedirection(result.error)) return this.#refusal(result.error);
      if (result.error.startsWith('MOVED')) this.#link.refreshTopology();
    }
    const result = await this.#movePieces(kind, value, slot, deadlineMs);
    if (kind === 'set' || result !== 'ok') return result;
    return (await this.#verifier.isSound(namespace, hash, slot, parseEntry(text).bytes)) ? 'ok' : 'wrong';
  }

  /** Can values be reached, with these credentials? KvError-free: 'ok', or why not. */
  async probe(partition: Partition): Promise<string> {
    const deadlineMs = performance.now() + this.#options.settings.timeLimitMs;
    this.#lastError = 'no answer within the time limit';
    const tryOut = async (kind: 'get' | 'set'): Promise<ValueResult> => {
      if (this.#isNative) {
        const identity = kind === 'get' ? Buffer.alloc(identityBytes) : null;
        const result = await this.#moveWhole(partition, '0 1 probe', 0, identity, deadlineMs);
        if (result === 'none') return 'none';
        if (typeof result !== 'object') return 'lost';
        if (!isRedirection(result.error)) return this.#refusal(result.error);
      }
      return new Promise((resolve) => {
        const piece = { key: `${partition.base}v:probe:0`, view: Buffer.alloc(0), start: 0, toEnd: true };
        this.#submit(kind, partition, piece, deadlineMs, resolve, 0, undefined);
      });
    };
    for (const kind of ['get', 'set'] as const) if ((await tryOut(kind)) !== 'none') return this.#lastError;
    return 'ok';
  }

  /** Every connection is destroyed, and all that moved has ended, when this returns. */
  disconnect(reason: string): void {
    const pools = [...this.#pools.values(), ...this.#lanes.values()];
    this.#pools.clear();
    this.#lanes.clear();
    for (const pool of pools) pool.close(reason);
  }

  /** The end: what is moved afterwards is 'lost'. */
  close(): void {
    this.disconnect('closed');
    this.#isClosed = true;
    this.#engine?.close();
    this.#engine = undefined;
  }

  get #isNative(): boolean {
    return this.#link.login.tls === undefined && this.#options.transport !== 'node';
  }

  /** By `identity` a get, or a set (null). */
  #moveWhole(
    partition: Partition,
    text: string,
    slot: number,
    identity: Uint8Array | null,
    deadlineMs: number,
  ): Promise<BulkResult | 'fault'> {
    const address = this.#link.address(partition);
    if (address === undefined || this.#isClosed) return Promise.resolve('lost');
    const { bytes, partBytes, id } = parseEntry(text);
    const keys = Buffer.from(`${partition.base}v:${id}:`);
    const kind = identity === null ? 'set' : 'get';
    return new Promise((onDone) => {
      this.#laneTo(address).submit({ kind, keys, slot, bytes, partBytes, identity, deadlineMs, onDone });
    });
  }

  #movePieces(kind: 'get' | 'set', { partition, text }: Value, slot: number, deadlineMs: number): Promise<ValueResult> {
    const { bytes, partBytes, id } = parseEntry(text);
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
    const address = target ?? this.#link.address(partition);
    if (address === undefined || this.#isClosed) {
      end('lost');
      return;
    }
    const onDone = (result: BulkResult): void => {
      if (typeof result !== 'object') {
        end(result === 'length' ? 'wrong' : result);
        return;
      }
      const [word, , place] = result.error.split(' ');
      if (isRedirection(result.error) && redirections < maxRedirections && performance.now() < deadlineMs) {
        if (word === 'MOVED') this.#link.refreshTopology();
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

  #pool(address: Address): BulkPool {
    let pool = this.#pools.get(address.name);
    if (pool === undefined) {
      const { connections, depth } = this.#options.settings;
      const connect = (on: ConstructorParameters<typeof BulkConnection>[2]) =>
        new BulkConnection(address, this.#link.login, on);
      pool = new BulkPool<BulkJob>({ connect, connections, depth, onFailure: (reason) => this.#note(reason) });
      this.#pools.set(address.name, pool);
    }
    return pool;
  }

  #laneTo(address: Address): BulkPool<ValueJob> {
    let pool = this.#lanes.get(address.name);
    if (pool === undefined) {
      this.#engine ??= new BulkEngine(this.#arena);
      const engine = this.#engine;
      const { connections, depth } = this.#options.settings;
      const connect = (on: ConstructorParameters<typeof BulkLane>[4]) =>
        new BulkLane(engine, address, this.#link.login, depth, on);
      const onFailure = (reason: string): void => this.#note(reason);
      pool = new BulkPool<ValueJob>({ connect, connections, depth: laneValues, onFailure });
      this.#lanes.set(address.name, pool);
    }
    return pool;
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
