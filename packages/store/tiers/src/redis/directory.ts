/**
 * One partition of the directory, as this node sees it: opened, listed page by page, then followed event by event. Invariants:
 * the index has what the server had at `lastEvent`, and what replies have told of blocks since; a gap in the events, another epoch or a
 * ledger that is gone is an error, after which the caller lists anew.
 *
 *     open ──▶ list (pages) ──▶ poll ──▶ poll ──▶ ...        write: reserve ──▶ (parts) ──▶ commit
 */
import { randomBytes } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import { type HashKey, hashOfKey, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import { SliceTimer } from '@kvtier/runtime';
import { ForeignValues } from './foreign-values.ts';
import type { Partition, RedisCommands } from './redis-commands.ts';
import type { RedisIndex } from './redis-index.ts';
import type { Reply } from './replies.ts';
import {
  namespaceBytes,
  parseCommitted,
  parseDone,
  parseEntry,
  parseListed,
  parseLook,
  parseName,
  parseOpened,
  parsePage,
  parsePolled,
  parseReserved,
  type State,
} from './replies.ts';
import { isNewerFormat, sweptBlocks } from './script-pieces.ts';
import {
  clockScript,
  commitScript,
  lookScript,
  openScript,
  orphansScript,
  pageScript,
  pollScript,
  removeScript,
  reserveScript,
  resetScript,
  type Script,
  touchScript,
} from './scripts.ts';

const pageEntries = 1000;
const pollEvents = 100;
/** Polls one after another while blocks end faster than each sweeps away: some thousands of them, a tenth of a second. */
const maxSweeps = 64;
const scanKeys = 1000;
/** Removals that wait for a server that takes none now; beyond it, a block may be listed again. */
const maxRefused = 4096;
/** Of a listing: beyond it a server goes round in circles. */
const maxPages = 1_000_000;
const clockAttempts = 4;
/** Uses are noted at most so much before or after their time. */
const clockSlackUs = 1_000_000;

/** What a write wants to store. `id` names the value and is never used again. */
export interface Reservation {
  readonly hash: HashKey;
  readonly id: string;
  readonly bytes: number;
}

/** One whose value's parts were sent: whether the server took all of them, when the block was used, and how long it may live. */
export interface Commitment extends Reservation {
  readonly written: boolean;
  /** On our clock, performance.now(). */
  readonly usedUs: number;
  /** undefined: without an end. */
  readonly ttlMs: number | undefined;
}

/** 'refused': no room; 'held': another has stored it. */
export type Answer = 'done' | 'held' | 'refused';

/** What the directory has: its name there, and its text, a character a byte. */
interface Listed {
  readonly field: Buffer;
  readonly text: string;
}

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

/** Nodes of a newer version use it, or did before they were brought back: it may be this one's again, and is left alone. */
export class NewerDirectory extends KvError {
  constructor(what: string) {
    const line = `${what}, of another version of kvtier; update back, choose another keyPrefix, or remove that key`;
    super('CONFIG', line, { retry: true, tier: 'redis' });
  }
}

/** Of a status that begins so. */
function notOurs(status: string): KvError {
  const what = `redis: ${status.slice('foreign: '.length)}`;
  if (isNewerFormat(what)) return new NewerDirectory(what);
  return new KvError('CONFIG', `${what}; choose another keyPrefix, or remove that key`);
}

export class Directory {
  readonly partition: Partition;
  readonly #commands: RedisCommands;
  readonly #index: RedisIndex;
  readonly #node: string;
  readonly #namespaces = new Map<string, Namespace>();
  /** Removed here and perhaps still in events to come: by entry, the last event that may name it (Infinity: not known yet). */
  readonly #leaving = new Map<string, number>();
  readonly #foreign = new ForeignValues();
  /** Of those that leave, those that the server refused to remove: entries and names. */
  readonly #refused: Listed[] = [];
  #epoch = '';
  /** Grows when the partition loses its server: a reply to what was asked before says nothing any more. */
  #life = 0;
  #isOpen = false;
  #lastEvent = 0;
  /** Its whole id on the server; '': not known yet. */
  #lastId = '';
  /** Number of the newest event that any reply has counted. */
  #newest = 0;
  /** Blocks that a reply has told of ahead of their events, and up to which event: what came before that is old news. Oldest first. */
  readonly #ahead = new Map<string, number>();
  /** Of events that replies have counted and no poll has brought yet: when they were made. This node's own changes are among them. */
  readonly #seen = new Map<number, number>();
  usedBytes = 0;
  capacityBytes = 0;
  /** The server's clock of recency less ours (performance.now()), microseconds. */
  clockOffsetUs = 0;
  /** Names and entries that are none, skipped. */
  nonsense = 0;

  constructor(partition: Partition, commands: RedisCommands, index: RedisIndex, node: string) {
    this.partition = partition;
    this.#commands = commands;
    this.#index = index;
    this.#node = node;
  }

  /** Is there a ledger? @throws as `open`, of keys that are not ours. Nothing is changed, whether it is open or not. */
  async look(): Promise<boolean> {
    const status = parseLook(await this.#ask(lookScript, []));
    if (status.startsWith('foreign')) throw notOurs(status);
    return status === 'ok';
  }

  /**
   * Take the partition as it is, or make it. KvError CONFIG when its keys are not ours; NewerDirectory, when they are a newer program's.
   * Returns whether it is empty and new.
   */
  async open(partitionCount: number, capacityBytes: number): Promise<boolean> {
    this.#leaving.clear();
    this.#refused.length = 0;
    this.#foreign.clear();
    this.capacityBytes = capacityBytes;
    let create = '';
    for (let attempt = 0; attempt < 100; attempt++) {
      const fresh = randomBytes(12).toString('base64url');
      const { status, epoch, opened } = parseOpened(
        await this.#ask(openScript, [partitionCount, capacityBytes, fresh, create]),
      );
      if (status.startsWith('foreign')) throw notOurs(status);
      if (opened === undefined) {
        create = (await this.#sweepOrphans(epoch)) ? '1' : '';
        continue;
      }
      this.#epoch = epoch;
      this.#newest = 0;
      this.#seen.clear();
      this.#ahead.clear();
      this.#lastEvent = opened.state.newest;
      this.#read(opened.state);
      this.#lastId = opened.lastId;
      if (this.usedBytes > this.capacityBytes) continue;
      await this.#measureClock();
      this.#isOpen = true;
      return create === '1';
    }
    throw new KvError('IO', 'redis: the directory could not be brought within its budget', { retry: true });
  }

  /**
   * Everything that the directory lists, a page at a time. What is no entry of a block is removed: nobody else would. A page tells
   * its newest event, so that a poll notices when the events from open() on are not those that led to it: what was listed from a past
   * that a failover has undone, no event would ever remove. KvError IO (retry) when the node must list anew.
   */
  async list(onPage: (count: number) => void): Promise<void> {
    let cursor = '0';
    let pages = 0;
    let from: string | undefined;
    do {
      if (++pages > maxPages) throw lost('is listed without an end');
      const { state, server, ...page } = parseListed(await this.#run(pageScript, [cursor, pageEntries]));
      this.#read(state);
      from ??= server;
      if (server !== from) throw lost('came to another server while it was listed');
      cursor = page.cursor;
      const wrong: Listed[] = [];
      for (let at = 0; at + 1 < page.found.length; at += 2) {
        const [field, text] = [page.found[at]!, page.found[at + 1]!];
        const name = parseName(field.toString('latin1'));
        if (name === undefined) this.nonsense++;
        if (name === undefined || !this.#stored(name.namespace, name.hash, text.toString('latin1')))
          wrong.push({ field, text: text.toString('latin1') });
      }
      if (wrong.length > 0) await this.#remove(wrong).catch(() => {}); // the next polls ask again
      onPage(page.found.length / 2);
    } while (cursor !== '0');
  }

  /** What has changed since. KvError IO (retry) when the node must list anew. */
  async poll(): Promise<void> {
    const refused = this.#refused.splice(0, pageEntries);
    if (refused.length > 0) await this.#remove(refused).catch(() => {});
    for (let polls = 1; ; polls++) {
      const last = this.#lastEvent;
      const reply = await this.#run(pollScript, [this.#node, last, pollEvents]);
      const life = this.#life;
      const timer = new SliceTimer();
      const { state, first, lastId, news } = parsePolled(reply, last);
      this.#read(state);
      if (state.newest > last && (first === 0 || first > last + 1)) throw lost('is ahead by too much');
      // The same number with another time: the server's past is not the one that we know.
      if (this.#lastId !== '' && lastId !== '' && lastId !== this.#lastId) throw lost('has another past');
      if (lastId !== '') this.#lastId = lastId;
      if (state.newest > last && news.length === 0) throw lost('lacks an event');
      let isSweeping = false;
      for (const event of news) {
        const { id, number, atUs, isRemoval } = event;
        if (!this.#isSame(number, atUs)) throw lost('has another past');
        const changes = event.changes();
        isSweeping ||= isRemoval && changes.length >= sweptBlocks;
        this.#seen.delete(number);
        this.#lastEvent = number;
        this.#lastId = id;
        for (const { namespace, hash, text } of changes) {
          // Others are told of each. Replies that come meanwhile are ahead of what is left, or say the same.
          if (timer.due) {
            await timer.next();
            if (life !== this.#life) throw lostMeanwhile();
          }
          if ((this.#ahead.get(namespace + hash) ?? 0) >= number) continue;
          if (isRemoval) this.#removed(namespace, hash, text);
          else this.#stored(namespace, hash, text);
        }
      }
      for (const [text, event] of this.#leaving) if (event <= this.#lastEvent) this.#leaving.delete(text);
      for (const [name, event] of this.#ahead) {
        if (event > this.#lastEvent) break;
        this.#ahead.delete(name);
      }
      // Ours are measured against a clock that has been set forward since.
      if (state.clockUs - performance.now() * 1000 > this.clockOffsetUs + clockSlackUs) await this.#measureClock();
      if (news.length < pollEvents && !(isSweeping && polls < maxSweeps)) return;
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
    const { state, answers, evicted } = parseReserved(reply, blocks.length);
    this.#read(state);
    const told = answers.map(({ letter, held }, i): Answer => {
      if (held === undefined) return letter === 'r' ? 'done' : 'refused';
      return this.#isNow(namespace.key, blocks[i]!.hash, held) ? 'held' : 'refused';
    });
    // The script may evict what it has answered for before, and never the other way round.
    for (const { namespace: key, hash } of evicted) this.#isNow(key, hash, undefined);
    return { answers: told, evicted: evicted.length };
  }

  /** List what was written; give back the reservation of what was not. `blocks`: all that were reserved together, and no others. */
  async commit(namespace: Namespace, blocks: readonly Commitment[], partBytes: number): Promise<Answer[]> {
    const flags = blocks.map(({ written }) => (written ? '1' : '0')).join('');
    const uses = blocks.map(({ usedUs }) => Math.round(usedUs + this.clockOffsetUs)).join(' ');
    const hasEnds = blocks.some(({ ttlMs }) => ttlMs !== undefined);
    const ttls = hasEnds ? blocks.map(({ ttlMs }) => (ttlMs === undefined ? '-' : Math.ceil(ttlMs))).join(' ') : '';
    const head = [this.#node, ttls, partBytes];
    const args = [...head, fieldsOf(namespace, blocks), wordsOf(blocks), flags, uses];
    const reply = await this.#run(commitScript, args);
    const { state, answers } = parseCommitted(reply, blocks.length);
    this.#read(state);
    return answers.map(({ letter, held }, i): Answer => {
      if (letter === 'n') return 'refused';
      const { hash, usedUs, id, bytes } = blocks[i]!;
      const entry = held ?? `${bytes} ${partBytes} ${id}`;
      if (!this.#isNow(namespace.key, hash, entry, usedUs)) return 'refused';
      return letter === 's' ? 'done' : 'held';
    });
  }

  /** What the block has by this entry is a newer program's: the index has forgotten it, and does not list it again. */
  passOver(namespace: Namespace, hash: HashKey, text: string): void {
    this.#foreign.add(namespace.key + hash, text);
  }

  /** The block has a value that was passed over: it is not to be written. */
  isForeign(namespace: Namespace, hash: HashKey): boolean {
    return this.#foreign.has(namespace.key + hash);
  }

  /** The index has forgotten these already; now the server does. KvError: it does not; the next polls ask again. */
  async remove(namespace: Namespace, blocks: readonly { hash: HashKey; text: string }[]): Promise<void> {
    await this.#remove(blocks.map(({ hash, text }) => ({ field: fieldOf(namespace, hash), text })));
  }

  async #remove(entries: readonly Listed[]): Promise<void> {
    for (const { text } of entries) this.#leaving.set(text, Number.POSITIVE_INFINITY);
    try {
      const args = entries.flatMap(({ field, text }) => [field, Buffer.from(text, 'latin1')]);
      const state = parseDone(await this.#run(removeScript, [this.#node, ...args]));
      this.#read(state);
      for (const { text } of entries) this.#leaving.set(text, state.newest);
    } catch (error) {
      for (const entry of entries) {
        if (this.#refused.length < maxRefused) this.#refused.push(entry);
        else this.#leaving.delete(entry.text);
      }
      throw error;
    }
  }

  /** `usedUs`: on our clock, performance.now(). */
  async touch(uses: readonly { readonly field: Buffer; readonly usedUs: number }[]): Promise<void> {
    const offsetUs = this.clockOffsetUs;
    await this.#run(
      touchScript,
      uses.flatMap(({ field, usedUs }) => [field, Math.round(usedUs + offsetUs)]),
    );
  }

  /** The server is lost: replies still to come are no news, and nothing is asked before it is opened anew. */
  end(): void {
    this.#life++;
    this.#isOpen = false;
  }

  /** From `open` to `end`. */
  get isOpen(): boolean {
    return this.#isOpen;
  }

  async #run(script: Script, args: readonly (string | number | Buffer)[]): Promise<Reply> {
    if (!this.#isOpen) throw lostMeanwhile();
    return await this.#ask(script, args);
  }

  async #ask(script: Script, args: readonly (string | number | Buffer)[]): Promise<Reply> {
    const life = this.#life;
    const reply = await this.#commands.run(script, this.partition, args).catch((error: unknown) => {
      // How it failed says nothing of the server that there is now.
      throw life === this.#life ? error : lostMeanwhile();
    });
    if (life !== this.#life) throw lostMeanwhile();
    return reply;
  }

  /**
   * The server holds no directory, or a broken one: values that no entry names would count for nobody. false: another node has made
   * a directory meanwhile, whose values must stay.
   */
  async #sweepOrphans(epoch: string): Promise<boolean> {
    await this.#ask(resetScript, [epoch]);
    const pattern = `${this.partition.base.replaceAll(/[*?[\]\\]/g, '\\$&')}v:*`;
    let cursor = '0';
    let pages = 0;
    do {
      if (++pages > maxPages) throw lost('is swept without an end');
      const args = [cursor, 'MATCH', pattern, 'COUNT', scanKeys, 'TYPE', 'string'];
      const { cursor: next, found } = parsePage(await this.#commands.command(this.partition, 'SCAN', args));
      cursor = next;
      for (let at = 0; at < found.length; at += scanKeys) {
        if ((await this.#ask(orphansScript, found.slice(at, at + scanKeys))) !== 1) return false;
      }
    } while (cursor !== '0');
    return true;
  }

  /** The quickest of a few answers tells the time best. */
  async #measureClock(): Promise<void> {
    let bestUs = Number.POSITIVE_INFINITY;
    let offsetUs = 0;
    for (let attempt = 0; attempt < clockAttempts; attempt++) {
      const startUs = performance.now() * 1000;
      const { clockUs } = parseDone(await this.#ask(clockScript, []));
      const tookUs = performance.now() * 1000 - startUs;
      if (tookUs >= bestUs) continue;
      bestUs = tookUs;
      offsetUs = clockUs - startUs - tookUs / 2;
    }
    this.clockOffsetUs = offsetUs;
  }

  /** KvError when this is not the directory that the replies before were about: they come in the order in which the server made them. */
  #read({ epoch, newest, newestUs, usedBytes, capBytes }: State): void {
    if (epoch !== this.#epoch) throw lost('has been made anew');
    if (newest < this.#newest) throw lost('has forgotten its latest events');
    if (!this.#isSame(newest, newestUs)) throw lost('has another past');
    this.#newest = newest;
    if (newest > this.#lastEvent) this.#seen.set(newest, newestUs);
    this.usedBytes = usedBytes;
    this.capacityBytes = capBytes;
  }

  /** false: the entry is none. */
  #stored(namespace: string, hash: HashKey, text: string, usedUs = 0): boolean {
    if (parseEntry(text) === undefined) {
      this.nonsense++;
      return false;
    }
    if (this.#leaving.has(text) || this.#foreign.has(namespace + hash, text)) return true;
    this.#foreign.forget(namespace + hash);
    // Copies: pieces of a long string would keep all of it.
    const copy = hashOfKey(hash).toString('latin1') as HashKey;
    this.#index.set(this.#namespaceOf(namespace), copy, text, usedUs);
    return true;
  }

  /**
   * The latest reply says so: the server has this entry of the block, or none, as of its newest event. Whoever else stored and removed
   * it before is told by events that are yet to come, and are older. false: the entry is none, or is passed over.
   */
  #isNow(namespace: string, hash: HashKey, text: string | undefined, usedUs = 0): boolean {
    const name = namespace + hash;
    const isForeign = text !== undefined && this.#foreign.has(name, text);
    if (text === undefined) this.#foreign.forget(name);
    if (text === undefined || isForeign || this.#leaving.has(text))
      this.#index.remove(this.#namespaceOf(namespace), hash);
    if (text !== undefined && !this.#stored(namespace, hash, text, usedUs)) return false;
    this.#ahead.delete(name);
    if (this.#newest > this.#lastEvent) this.#ahead.set(name, this.#newest);
    return !isForeign;
  }

  /** Is the event of this number the one that was seen? Nodes of before did not note when they made one. */
  #isSame(number: number, atUs: number): boolean {
    const seenUs = this.#seen.get(number);
    return seenUs === undefined || seenUs === atUs || atUs <= 1;
  }

  #removed(namespace: string, hash: HashKey, text: string): void {
    const entry = parseEntry(text) === undefined ? undefined : text;
    this.#foreign.forget(namespace + hash, entry);
    this.#index.remove(this.#namespaceOf(namespace), hash, entry);
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

const lostMeanwhile = (): KvError => new KvError('CANCELLED', 'redis: the server was lost meanwhile', { retry: true });

function lost(how: string): KvError {
  return new KvError('IO', `redis: the directory ${how}; it is listed again`, { retry: true, tier: 'redis' });
}
