/**
 * Values between the arena and the servers, in parts: each part a key of its own, moved by the pools. A part is written at once, and
 * read in pieces: a server takes a value in as it arrives, but sends a whole answer before anybody else gets his turn. Follows MOVED
 * and ASK. Invariant: a value ends once, after its last piece has; then nothing touches its slot any more.
 */
import type { ArenaMemory } from '../arena-memory.ts';
import type { BulkAddress, BulkResult } from './bulk-connection.ts';
import { BulkPool } from './bulk-pool.ts';
import { parseEntry } from './directory.ts';
import { addressNamed, type Partition, type RedisLink } from './link.ts';
import type { RedisSettings } from './settings.ts';

/** 'none': a key is not there (expired, evicted, never reserved); 'wrong': not what its entry says; 'refused': by the server. */
export type ValueResult = 'ok' | 'none' | 'wrong' | 'lost' | 'refused';

const maxRedirections = 4;
/** What one answer of a server carries at most. */
const pieceBytes = 256 << 10;

interface Piece {
  readonly key: string;
  readonly view: Buffer;
  readonly start: number;
  readonly toEnd: boolean;
}

export class Values {
  readonly #link: RedisLink;
  readonly #memory: ArenaMemory;
  readonly #settings: RedisSettings;
  readonly #pools = new Map<string, BulkPool>();
  readonly #onError: (line: string) => void;
  #lastError = '';

  /** `onError`: a line of the server, or why a connection ended. */
  constructor(link: RedisLink, memory: ArenaMemory, settings: RedisSettings, onError: (line: string) => void) {
    this.#link = link;
    this.#memory = memory;
    this.#settings = settings;
    this.#onError = onError;
  }

  /** Move the value of an entry to or from a slot. */
  move(kind: 'get' | 'set', partition: Partition, text: string, slot: number): Promise<ValueResult> {
    const { bytes, partBytes, id } = parseEntry(text);
    const deadlineMs = performance.now() + this.#settings.timeLimitMs;
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

  /** Can values be reached, with these credentials? KvError-free: 'ok', or why not. */
  async probe(partition: Partition): Promise<string> {
    const deadlineMs = performance.now() + this.#settings.timeLimitMs;
    this.#lastError = 'no answer within the time limit';
    const tryOut = (kind: 'get' | 'set'): Promise<ValueResult> =>
      new Promise((resolve) => {
        const piece = { key: `${partition.base}v:probe:0`, view: Buffer.alloc(0), start: 0, toEnd: true };
        this.#submit(kind, partition, piece, deadlineMs, resolve, 0, undefined);
      });
    for (const kind of ['get', 'set'] as const) if ((await tryOut(kind)) !== 'none') return this.#lastError;
    return 'ok';
  }

  /** Every connection is destroyed, and all that moved has ended, when this returns. */
  disconnect(reason: string): void {
    const pools = [...this.#pools.values()];
    this.#pools.clear();
    for (const pool of pools) pool.close(reason);
  }

  #submit(
    kind: 'get' | 'set',
    partition: Partition,
    piece: Piece,
    deadlineMs: number,
    end: (result: ValueResult) => void,
    redirections: number,
    target: (BulkAddress & { readonly name: string; readonly asking: boolean }) | undefined,
  ): void {
    const address = target ?? this.#link.address(partition);
    if (address === undefined) {
      end('lost');
      return;
    }
    const onDone = (result: BulkResult): void => {
      if (typeof result !== 'object') {
        end(result === 'length' ? 'wrong' : result);
        return;
      }
      const [word, , place] = result.error.split(' ');
      const isRedirection = (word === 'MOVED' || word === 'ASK') && place !== undefined;
      if (isRedirection && redirections < maxRedirections && performance.now() < deadlineMs) {
        if (word === 'MOVED') this.#link.refreshTopology();
        const named = addressNamed(place);
        // An empty host: the server that answered.
        const next = { ...named, host: named.host === '' ? address.host : named.host, asking: word === 'ASK' };
        this.#submit(kind, partition, piece, deadlineMs, end, redirections + 1, next);
        return;
      }
      this.#note(result.error);
      end(/^(OOM|MISCONF|NOREPLICAS)/.test(result.error) ? 'refused' : 'lost');
    };
    this.#pool(address).submit({ kind, ...piece, deadlineMs, asking: target?.asking ?? false, onDone });
  }

  #pool(address: BulkAddress & { readonly name: string }): BulkPool {
    let pool = this.#pools.get(address.name);
    if (pool === undefined) {
      const { connections, depth } = this.#settings;
      const onFailure = (reason: string): void => this.#note(reason);
      pool = new BulkPool({ address, login: this.#link.login, connections, depth, onFailure });
      this.#pools.set(address.name, pool);
    }
    return pool;
  }

  #note(line: string): void {
    this.#lastError = line;
    this.#onError(line);
  }
}
