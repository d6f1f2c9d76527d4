/**
 * What a server says, before anybody believes it: its scripts' replies, the names and entries of its directory, its events. Others may
 * write into the same database, a disk may be damaged, a proxy may lie: each number is made here and nowhere else, whole and in range,
 * each name and id has its form.
 *
 * Invariant: whatever the bytes, the end is a value of the declared type, undefined (an entry that is none: skipped), or a KvError
 * (a reply that is none: the directory is listed anew). script-pieces.ts judges entries by the same rules.
 */
import { KvError } from '@kvtier/errors';
import { type HashKey, headerBytes } from '@kvtier/identity';

/** As a server answers a command. */
export type Reply = Buffer | number | null | readonly Reply[];

export const namespaceBytes = 32;
/** Of a value: each is a key and some commands. */
export const maxParts = 4000;
/** Of a value's id. Ours have 12 characters, a point and a count. */
export const maxIdLength = 64;
/** Of a value: no object is as large. */
export const maxValueBytes = 2 ** 40;

/** Where a value is: its keys are `id` and the number of the part, of `partBytes` each. */
export interface Entry {
  readonly bytes: number;
  readonly partBytes: number;
  readonly id: string;
}

/** Of an entry's text, "bytes partBytes id"; undefined: it is none. */
export function parseEntry(text: string): Entry | undefined {
  const [, first, second, id] = /^([1-9]\d{0,14}) ([1-9]\d{0,14}) ([\w.-]{1,64})$/.exec(text) ?? [];
  if (id === undefined) return undefined;
  const [bytes, partBytes] = [Number(first), Number(second)];
  const isSound = bytes >= headerBytes && bytes <= maxValueBytes && Math.ceil(bytes / partBytes) <= maxParts;
  return isSound ? { bytes, partBytes, id } : undefined;
}

/** A block's name in the directory. */
export interface Name {
  /** The key of a namespace. */
  readonly namespace: string;
  readonly hash: HashKey;
}

/** undefined: it is none. Hashes of 16 bytes and of 32 are in use. */
export function parseName(field: string): Name | undefined {
  const hashBytes = field.length - namespaceBytes;
  if (hashBytes !== 16 && hashBytes !== 32) return undefined;
  return { namespace: field.slice(0, namespaceBytes), hash: field.slice(namespaceBytes) as HashKey };
}

/** A block that came or went; its entry may still be none: one that went with none is gone whatever it was. */
export interface Change extends Name {
  readonly text: string;
}

/** Of a partition's ledger, after a script. */
export interface State {
  readonly epoch: string;
  readonly usedBytes: number;
  readonly capBytes: number;
  /** Number of the newest event. */
  readonly newest: number;
  /** The clock of recency, microseconds. */
  readonly clockUs: number;
  /** When the newest event was made, by that clock: tells it from another of its number. */
  readonly newestUs: number;
}

export interface News {
  /** The whole id of the event, which begins with its number. */
  readonly id: string;
  readonly number: number;
  /** When it was made; 1: by a node that does not say. */
  readonly atUs: number;
  readonly node: string;
  readonly isRemoval: boolean;
  /** Read when they are asked for: an answer has up to a hundred thousand. @throws KvError IO (retry): they are none */
  readonly changes: () => readonly Change[];
}

const nonsense = (what: string): KvError =>
  new KvError('IO', `redis: the server sent ${what} that is none; the directory is listed again`, {
    retry: true,
    tier: 'redis',
  });

const list = (reply: Reply | undefined, what: string): readonly Reply[] => {
  if (!Array.isArray(reply)) throw nonsense(what);
  return reply as readonly Reply[];
};
const bytes = (reply: Reply | undefined, what: string): Buffer => {
  if (!Buffer.isBuffer(reply)) throw nonsense(what);
  return reply;
};
const text = (reply: Reply | undefined, what: string): string => bytes(reply, what).toString('latin1');
/** An integer of RESP, or of the text of a stream's id. */
function count(reply: Reply | string | undefined, what: string): number {
  const value = typeof reply === 'string' && /^\d{1,16}$/.test(reply) ? Number(reply) : reply;
  if (typeof value !== 'number' || !Number.isSafeInteger(value) || value < 0) throw nonsense(what);
  return value;
}

export function parseState(reply: Reply | undefined): State {
  const [epoch, used, cap, newest, clock, at] = list(reply, 'a ledger');
  return {
    epoch: text(epoch, 'an epoch'),
    usedBytes: count(used, 'a number of bytes'),
    capBytes: count(cap, 'a budget'),
    newest: count(newest, 'a number of events'),
    clockUs: count(clock, 'a time'),
    newestUs: count(at, 'a time'),
  };
}

/** 'ok' with the state and the id of the last event; else what it says instead, and the epoch of what is there. */
export function parseOpened(reply: Reply): {
  status: string;
  epoch: string;
  opened?: { state: State; lastId: string };
} {
  const [status, ...rest] = list(reply, 'an answer');
  const said = text(status, 'a status');
  if (said !== 'ok') return { status: said, epoch: rest.length === 0 ? '' : text(rest[0], 'an epoch') };
  const state = parseState(rest[0]);
  return { status: said, epoch: state.epoch, opened: { state, lastId: text(rest[1], 'an event') } };
}

/** What there is instead of a directory that was opened: the first word of an answer. */
export const parseLook = (reply: Reply): string => text(list(reply, 'an answer')[0], 'a status');

/** A page of SCAN: where to go on, and what was found. */
export function parsePage(reply: Reply): { cursor: string; found: Buffer[] } {
  const [cursor, found] = list(reply, 'a page');
  const next = text(cursor, 'a cursor');
  if (!/^\d{1,20}$/.test(next)) throw nonsense('a cursor');
  return { cursor: next, found: list(found, 'a page').map((each) => bytes(each, 'a name')) };
}

/** A page of the directory: names and entries in turn, as of `state`. */
export function parseListed(reply: Reply): { state: State; server: string; cursor: string; found: Buffer[] } {
  const [state, server, ...page] = list(reply, 'an answer');
  return { state: parseState(state), server: text(server, 'a name'), ...parsePage(page) };
}

/** `last`: the number of the last event known. `lastId`: the id that it has on the server; '': none. In order, without a gap. */
export function parsePolled(reply: Reply, last: number): { state: State; first: number; lastId: string; news: News[] } {
  const [state, first, lastId, events] = list(reply, 'an answer');
  let number = last;
  const news = list(events, 'events').map((event): News => {
    const [name, fields] = list(event, 'an event');
    const id = text(name, 'an event');
    const [ours, node, kind, names, entries, texts, ...more] = list(fields, 'an event').map((each) =>
      text(each, 'an event'),
    );
    const isOurs = ours === 'n' && entries === 'e' && (kind === 's' || kind === 'r') && more.length === 0;
    const [next, atUs] = id.split('-').map((part) => count(part, 'an event')) as [number, number];
    if (!isOurs || next !== ++number) throw nonsense('an event');
    return { id, number, atUs, node: node!, isRemoval: kind === 'r', changes: () => parseChanges(names!, texts!) };
  });
  return { state: parseState(state), first: count(first, 'an event'), lastId: text(lastId, 'an event'), news };
}

/** Names one after the other, each behind a byte with its length, and their entries, a line each. */
function parseChanges(names: string, entries: string): Change[] {
  if (names === '' && entries === '') return [];
  let at = 0;
  const changes = entries.split('\n').map((entry): Change => {
    const end = at + 1 + names.charCodeAt(at);
    const name = parseName(names.slice(at + 1, end));
    if (name === undefined) throw nonsense('a name');
    at = end;
    return { ...name, text: entry };
  });
  if (at !== names.length) throw nonsense('a list of names');
  return changes;
}

/** A letter for each of `blocks`, of those in `letters`; for each 'h' the entry that is held. */
function parseAnswers(answers: Reply | undefined, held: Reply | undefined, blocks: number, letters: RegExp) {
  const said = text(answers, 'an answer');
  const others = list(held, 'entries').map((each) => text(each, 'an entry'));
  const heldCount = said.split('h').length - 1;
  if (said.length !== blocks || !letters.test(said) || heldCount !== others.length) throw nonsense('an answer');
  let next = 0;
  return Array.from(said, (letter) => ({ letter, held: letter === 'h' ? others[next++] : undefined }));
}

export function parseReserved(reply: Reply, blocks: number) {
  const [state, answers, held, names, entries] = list(reply, 'an answer');
  return {
    state: parseState(state),
    answers: parseAnswers(answers, held, blocks, /^[rnh]*$/),
    evicted: parseChanges(text(names, 'names'), text(entries, 'entries')),
  };
}

export function parseCommitted(reply: Reply, blocks: number) {
  const [state, answers, held] = list(reply, 'an answer');
  return { state: parseState(state), answers: parseAnswers(answers, held, blocks, /^[snh]*$/) };
}

/** Of a script that says nothing but its state. */
export function parseDone(reply: Reply): State {
  return parseState(list(reply, 'an answer')[0]);
}
