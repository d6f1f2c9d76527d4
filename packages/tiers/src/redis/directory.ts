/**
 * One partition of the directory, as this node sees it: opened, listed page by page, then followed event by event. Invariants:
 * the index has what the server had at `lastEvent`, and this node's own changes since; a gap in the events, another epoch or a
 * ledger that is gone is an error, after which the caller lists anew.
 *
 *     open ──▶ list (HSCAN) ──▶ poll ──▶ poll ──▶ ...        write: reserve ──▶ (parts) ──▶ commit
 */
import { randomBytes } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import { type HashKey, hashOfKey, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import type { BlockIndex } from './block-index.ts';
import type { Partition, RedisLink, Reply } from './link.ts';
import {
  commitScript,
  openScript,
  pollScript,
  removeScript,
  reserveScript,
  resetScript,
  type Script,
  touchScript,
} from './scripts.ts';

const namespaceBytes = 32;
const pageEntries = 1000;
const pollEvents = 100;
const scanKeys = 1000;

/** What a write wants to store. `id` names the value and is never used again. */
export interface Reservation {
  readonly hash: HashKey;
  readonly id: string;
  readonly bytes: number;
}

/** 'refused': no room; 'held': another has stored it. */
export type Answer = 'done' | 'held' | 'refused';

/** The directory's name of a block. */
export const fieldOf = (namespace: Namespace, hash: HashKey): Buffer =>
  Buffer.concat([namespace.digest, hashOfKey(hash)]);

/** Of several, one after the other, each behind a byte with its length: hashes of 16 bytes and of 32 are in use. */
function fieldsOf(namespace: Namespace, blocks: readonly { readonly hash: HashKey }[]): Buffer {
  let text = '';
  for (const { hash } of blocks) text += String.fromCharCode(namespaceBytes + hash.length) + namespace.key + hash;
  return Buffer.from(text, 'latin1');
}

/** The lease of what is reserved together is named by this: id and bytes of each. */
const wordsOf = (blocks: readonly Reservation[]): string => blocks.map(({ id, bytes }) => `${id} ${bytes}`).join(' ');

/** Names one after the other, each behind its length, and their entries, a line each. */
function* changesIn(fields: Buffer, entries: Buffer): Generator<[namespace: string, hash: HashKey, text: string]> {
  if (fields.length === 0) return;
  const names = fields.toString('latin1');
  let at = 0;
  for (const text of entries.toString('latin1').split('\n')) {
    const hashAt = at + 1 + namespaceBytes;
    const end = at + 1 + names.charCodeAt(at);
    yield [names.slice(at + 1, hashAt), names.slice(hashAt, end) as HashKey, text];
    at = end;
  }
}

/** Where a value is: its keys are `id` and the number of the part, of `partBytes` each. */
export interface Entry {
  readonly bytes: number;
  readonly partBytes: number;
  readonly id: string;
}

/** Of an entry's text. */
export function parseEntry(text: string): Entry {
  const [bytes, partBytes, id] = text.split(' ');
  return { bytes: Number(bytes), partBytes: Number(partBytes), id: id! };
}

export class Directory {
  readonly partition: Partition;
  readonly #link: RedisLink;
  readonly #index: BlockIndex;
  readonly #node: string;
  readonly #namespaces = new Map<string, Namespace>();
  /** Removed here and perhaps still in events to come: by entry, the last event that may name it (Infinity: not known yet). */
  readonly #leaving = new Map<string, number>();
  #epoch = '';
  /** Grows when the tier loses its server: a reply to what was asked before says nothing any more. */
  #life = 0;
  #lastEvent = 0;
  usedBytes = 0;
  capacityBytes = 0;

  constructor(partition: Partition, link: RedisLink, index: BlockIndex, node: string) {
    this.partition = partition;
    this.#link = link;
    this.#index = index;
    this.#node = node;
  }

  /** Take the partition as it is, or make it. KvError CONFIG when its keys are not ours. Returns whether it is empty and new. */
  async open(partitionCount: number, capacityBytes: number): Promise<boolean> {
    this.#leaving.clear();
    this.capacityBytes = capacityBytes;
    let create = '';
    for (let attempt = 0; attempt < 100; attempt++) {
      const epoch = randomBytes(12).toString('base64url');
      const reply = await this.#run(openScript, [partitionCount, capacityBytes, epoch, create]);
      const [status, ...state] = reply as readonly Reply[];
      const text = String(status);
      if (text.startsWith('foreign')) {
        throw new KvError('CONFIG', `redis: ${text.slice(9)}; choose another keyPrefix, or remove that key`);
      }
      if (text !== 'ok') {
        await this.#sweepOrphans(String(state[0]));
        create = '1';
        continue;
      }
      this.#epoch = String(state[0]);
      this.#read(state);
      this.#lastEvent = Number(state[3]);
      if (this.usedBytes <= this.capacityBytes) return create === '1';
    }
    throw new KvError('IO', 'redis: the directory could not be brought within its budget', { retry: true });
  }

  /** Everything that the directory lists, a page at a time. */
  async list(onPage: (count: number) => void): Promise<void> {
    let cursor = '0';
    const life = this.#life;
    do {
      const args = [this.partition.keys[1]!, cursor, 'COUNT', pageEntries];
      const [next, rows] = (await this.#link.command(this.partition, 'HSCAN', args)) as [Buffer, Buffer[]];
      if (life !== this.#life) throw lost('was lost while it was listed');
      cursor = String(next);
      for (let at = 0; at < rows.length; at += 2) {
        const name = rows[at]!.toString('latin1');
        this.#stored(name.slice(0, namespaceBytes), name.slice(namespaceBytes) as HashKey, String(rows[at + 1]!));
      }
      onPage(rows.length / 2);
    } while (cursor !== '0');
  }

  /** What has changed since. KvError IO (retry) when the node must list anew. */
  async poll(): Promise<void> {
    for (;;) {
      const reply = await this.#run(pollScript, [this.#node, this.#lastEvent, pollEvents]);
      const [state, first, events] = reply as [Reply[], number, [Buffer, Buffer[]][]];
      if (String(state[0]) !== this.#epoch) throw lost('has been made anew');
      this.#read(state);
      const newest = Number(state[3]);
      if (newest > this.#lastEvent && (first === 0 || first > this.#lastEvent + 1)) throw lost('is ahead by too much');
      for (const [id, [, node, kind, fields, , entries]] of events) {
        this.#lastEvent = Number(String(id).split('-')[0]);
        const isRemoval = String(kind) === 'r';
        if (!isRemoval && String(node) === this.#node) continue;
        for (const [namespace, hash, text] of changesIn(fields!, entries!)) {
          if (isRemoval) this.#index.remove(this.#namespaceOf(namespace), hash, text);
          else this.#stored(namespace, hash, text);
        }
      }
      for (const [text, event] of this.#leaving) if (event <= this.#lastEvent) this.#leaving.delete(text);
      if (events.length < pollEvents) return;
    }
  }

  /** Room for blocks, and an entry to write the value under. What had to go for it is gone when this returns: its number. */
  async reserve(
    namespace: Namespace,
    blocks: readonly Reservation[],
    terms: { leaseMs: number; partBytes: number; share: number | undefined },
  ): Promise<{ answers: Answer[]; evicted: number }> {
    const share = terms.share === undefined ? '' : Math.floor(terms.share * this.capacityBytes);
    const head = [this.#node, terms.leaseMs, terms.partBytes, share];
    const reply = await this.#run(reserveScript, [...head, fieldsOf(namespace, blocks), wordsOf(blocks)]);
    const [state, answers, held, gone, entries] = reply as [Reply[], Buffer, Buffer[], Buffer, Buffer];
    this.#read(state);
    let evicted = 0;
    for (const [key, hash, text] of changesIn(gone, entries)) {
      this.#index.remove(this.#namespaceOf(key), hash, text);
      evicted++;
    }
    const next = held.values();
    const told = Array.from(answers.toString('latin1'), (letter, i): Answer => {
      if (letter !== 'h') return letter === 'r' ? 'done' : 'refused';
      this.#stored(namespace.key, blocks[i]!.hash, String(next.next().value!));
      return 'held';
    });
    return { answers: told, evicted };
  }

  /** List what was written; give back the reservation of what was not. `blocks`: all that were reserved together. */
  async commit(
    namespace: Namespace,
    blocks: readonly (Reservation & { readonly written: boolean; readonly usedUs: number })[],
    terms: { ttlMs: number | undefined; partBytes: number; offsetUs: number },
  ): Promise<Answer[]> {
    const flags = blocks.map(({ written }) => (written ? '1' : '0')).join('');
    const uses = blocks.map(({ usedUs }) => Math.round(usedUs + terms.offsetUs)).join(' ');
    const head = [this.#node, terms.ttlMs ?? '', terms.partBytes];
    const args = [...head, fieldsOf(namespace, blocks), wordsOf(blocks), flags, uses];
    const reply = await this.#run(commitScript, args);
    const [state, answers, held] = reply as [Reply[], Buffer, Buffer[]];
    this.#read(state);
    const next = held.values();
    return Array.from(answers.toString('latin1'), (letter, i): Answer => {
      if (letter === 'n') return 'refused';
      const { hash, usedUs, id, bytes } = blocks[i]!;
      const entry = letter === 's' ? `${bytes} ${terms.partBytes} ${id}` : String(next.next().value!);
      if (!this.#leaving.has(entry)) this.#index.set(namespace, hash, entry, usedUs);
      return letter === 's' ? 'done' : 'held';
    });
  }

  /** The index has forgotten these already; now the server does. */
  async remove(namespace: Namespace, blocks: readonly { hash: HashKey; text: string }[]): Promise<void> {
    for (const { text } of blocks) this.#leaving.set(text, Number.POSITIVE_INFINITY);
    const args = blocks.flatMap(({ hash, text }) => [fieldOf(namespace, hash), text]);
    const [state] = (await this.#run(removeScript, [this.#node, ...args])) as [Reply[]];
    this.#read(state);
    for (const { text } of blocks) this.#leaving.set(text, Number(state[3]));
  }

  /** `usedUs`: on the server's clock. */
  async touch(uses: readonly { readonly field: Buffer; readonly usedUs: number }[]): Promise<void> {
    await this.#run(
      touchScript,
      uses.flatMap(({ field, usedUs }) => [field, Math.round(usedUs)]),
    );
  }

  /** The server is lost: replies still to come are no news. */
  end(): void {
    this.#life++;
  }

  async #run(script: Script, args: readonly (string | number | Buffer)[]): Promise<Reply> {
    const life = this.#life;
    const reply = await this.#link.run(script, this.partition, args);
    if (life !== this.#life) throw new KvError('CANCELLED', 'redis: the server was lost meanwhile', { retry: true });
    return reply;
  }

  /** The server holds no directory, or a broken one: values that no entry names would count for nobody. */
  async #sweepOrphans(epoch: string): Promise<void> {
    await this.#run(resetScript, [epoch]);
    const pattern = `${this.partition.base.replaceAll(/[*?[\]\\]/g, '\\$&')}v:*`;
    let cursor = '0';
    do {
      const args = [cursor, 'MATCH', pattern, 'COUNT', scanKeys, 'TYPE', 'string'];
      const [next, keys] = (await this.#link.command(this.partition, 'SCAN', args)) as [Buffer, Buffer[]];
      cursor = String(next);
      if (keys.length > 0) await this.#link.command(this.partition, 'UNLINK', keys);
    } while (cursor !== '0');
  }

  #read(state: readonly Reply[]): void {
    this.usedBytes = Number(state[1]);
    this.capacityBytes = Number(state[2]);
  }

  #stored(namespace: string, hash: HashKey, text: string): void {
    if (this.#leaving.has(text)) return;
    // A copy: pieces of a long string would keep all of it.
    this.#index.set(this.#namespaceOf(namespace), hashOfKey(hash).toString('latin1') as HashKey, text);
  }

  #namespaceOf(key: string): Namespace {
    let namespace = this.#namespaces.get(key);
    if (namespace === undefined) {
      // Bounded: a server's namespaces are few; should they not be, they are made again.
      if (this.#namespaces.size >= 4096) this.#namespaces.clear();
      namespace = namespaceFromDigest(Buffer.from(key, 'latin1'));
      this.#namespaces.set(namespace.key, namespace);
    }
    return namespace;
  }
}

function lost(how: string): KvError {
  return new KvError('IO', `redis: the directory ${how}; it is listed again`, { retry: true, tier: 'redis' });
}
