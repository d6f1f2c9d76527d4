/**
 * The list of members on its server, one call a script. Whatever the bytes of an answer, the end is a value of the declared type or a
 * KvError: others may write into the same database.
 */
import { randomBytes } from 'node:crypto';
import { KvError } from '@kvtier/errors';
import { RedisClient, type RedisServers } from '@kvtier/redis';
import { announceScript, keyNames, ownerLength, readScript, removeScript } from './scripts.ts';

/** Soon back after the servers are: a lease is short. */
const maxBackoffMs = 250;
/** Of one record, owner included. */
export const maxRecordBytes = 8_192;

export interface Lease {
  readonly status: 'ok' | 'taken' | 'full';
  /** Of the lease that is held, ms on the server's clock. */
  readonly endMs: number;
}

export interface Listed {
  readonly id: string;
  /** What its owner wrote (JSON, to be validated). */
  readonly text: string;
}

export interface Look {
  readonly version: string;
  readonly count: number;
  /** On the server's clock. */
  readonly nowMs: number;
  /** undefined: as it was when `version` and `count` were read. */
  readonly members: readonly Listed[] | undefined;
}

const nonsense = (what: string): KvError =>
  new KvError('IO', `redis: the list of members has ${what} that is none; does another program use its keys?`, {
    retry: true,
  });
const textOf = (reply: unknown, what: string): string => {
  if (!Buffer.isBuffer(reply)) throw nonsense(what);
  return reply.toString('utf8');
};
const numberOf = (reply: unknown): number => {
  if (!Number.isSafeInteger(reply)) throw nonsense('a number');
  return reply as number;
};
const listOf = (reply: unknown, what: string): readonly unknown[] => {
  if (!Array.isArray(reply)) throw nonsense(what);
  return reply;
};

export class MemberList {
  readonly #client: RedisClient;
  readonly #keys: readonly string[];
  readonly #timeLimitMs: number;

  /** Begins to connect. KvError CONFIG for what cannot work. `onLost`: a connection ended. */
  constructor(settings: RedisServers & { readonly keyPrefix: string }, onLost: () => void = () => {}) {
    this.#keys = keyNames.map((name) => `${settings.keyPrefix}{members}:${name}`);
    this.#timeLimitMs = settings.timeLimitMs;
    this.#client = new RedisClient(settings, onLost, maxBackoffMs);
  }

  /** Takes the name, or renews its lease. KvError when the server does not answer. */
  async announce(id: string, owner: string, record: string, leaseMs: number): Promise<Lease> {
    const answer = listOf(await this.#run(announceScript, [id, owner, record, leaseMs, word()]), 'an answer');
    const [status, end] = [textOf(answer[0], 'an answer'), textOf(answer[1], 'a time')];
    if (status !== 'ok' && status !== 'taken' && status !== 'full') throw nonsense('an answer');
    if (!/^\d{1,15}$/.test(end)) throw nonsense('a time');
    return { status, endMs: Number(end) };
  }

  async remove(id: string, owner: string): Promise<void> {
    await this.#run(removeScript, [id, owner, word()]);
  }

  /** KvError when the server does not answer. */
  async look(known: Pick<Look, 'version' | 'count'>): Promise<Look> {
    const answer = listOf(await this.#run(readScript, [known.version, known.count]), 'an answer');
    const [version, count, nowMs] = [textOf(answer[0], 'a version'), numberOf(answer[1]), numberOf(answer[2])];
    if (answer.length === 3) return { version, count, nowMs, members: undefined };
    const records = listOf(answer[4], 'records');
    const members = listOf(answer[3], 'ids').flatMap((id, index): Listed[] => {
      const record = records[index];
      // A lease without a record, or one that nobody of ours wrote.
      if (!Buffer.isBuffer(record) || record.length > maxRecordBytes) return [];
      return [{ id: textOf(id, 'an id'), text: record.toString('utf8').slice(ownerLength) }];
    });
    return { version, count, nowMs, members };
  }

  /** After a failure: what is connected may be connected to nothing any more. */
  reset(): void {
    this.#client.reset();
  }

  close(): void {
    this.#client.close();
  }

  async #run(...[script, args]: [Parameters<RedisClient['run']>[0], readonly (string | number)[]]): Promise<unknown> {
    await this.#client.ready(this.#timeLimitMs);
    return await this.#client.run(script, this.#keys, args);
  }
}

const word = (): string => randomBytes(12).toString('base64url');
