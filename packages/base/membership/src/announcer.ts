/**
 * A member keeps its own record up: takes its name in the list, renews the lease, says when it drains, and goes out of the list at
 * its end. Invariants: nothing of the member waits for Redis, but its end, within a limit; whatever becomes of the servers it comes
 * back by itself; a name that another member holds and renews is not taken, which is one line.
 *
 *     starting ──▶ announced ──(no answer)──▶ away ──▶ announced      refused: the name is another's, asked for again and again
 */
import { randomBytes } from 'node:crypto';
import type { EventSource, MemberServers, NodeRecord, WorkerRecord } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { RedisServers } from '@kvtier/redis';
import type { Log } from '@kvtier/runtime';
import { type Lease, MemberList, maxRecordBytes } from './member-list.ts';
import { Reasons } from './reasons.ts';
import { ownerLength } from './scripts.ts';
import { Wakeable } from './wakeable.ts';

export interface AnnounceOptions {
  readonly redis: MemberServers & Pick<RedisServers, 'place' | 'onProblem'>;
  /** Renewed three times a lease. */
  readonly leaseMs: number;
  readonly log: Log;
}

/** What of a record may change: `peers` of a node, undefined where it need not say them. */
type Changed = { readonly events: EventSource | null } | { readonly peers: NodeRecord['peers'] };

export interface Announced {
  /** 'starting': not yet. 'away': the servers do not answer. 'refused': another member has the name. */
  readonly state: 'starting' | 'announced' | 'away' | 'refused';
  /** Its record says so from now on; its readers see it within a look. */
  change(part: Changed): void;
  /**
   * It gets nothing new from now on. Fulfilled when the list has it and its readers had the time to look, or when the list does not
   * have it after `limitMs`; never rejected.
   */
  drain(limitMs: number): Promise<void>;
  /** Out of the list, where the servers answer in time. */
  close(): Promise<void>;
}

/** Begins, and does not wait. KvError CONFIG for what can never work. */
export const announceWorker = (record: WorkerRecord, options: AnnounceOptions): Announced =>
  new MemberAnnouncer(`worker:${record.name}`, record, options);

/** Begins, and does not wait. KvError CONFIG for what can never work. */
export const announceNode = (record: NodeRecord, options: AnnounceOptions): Announced =>
  new MemberAnnouncer(`node:${record.name}`, record, options);

const renewalsPerLease = 3;
/** Whoever reads the list has looked by then (`pollMs` of `redisDiscoverySchema`, and a round trip). */
const readersLookMs = 250;
/** Until the next attempt after a failure. */
const retryMs = 200;

class MemberAnnouncer implements Announced {
  readonly #id: string;
  readonly #options: AnnounceOptions;
  readonly #list: MemberList;
  readonly #owner = randomBytes(ownerLength / 2).toString('hex');
  readonly #pause = new Wakeable();
  readonly #running: Promise<void>;
  #record: object;
  #state: Announced['state'] = 'starting';
  #reasons = new Reasons();
  /** Until when the lease lasts that kept us out when we asked last. */
  #othersEndMs: number | undefined;
  #isClosed = false;
  /** Each is told once the record as it is now is in the list. */
  readonly #onAnnounced: (() => void)[] = [];

  constructor(id: string, record: object, options: AnnounceOptions) {
    this.#id = id;
    this.#record = record;
    this.#options = options;
    const bytes = ownerLength + Buffer.byteLength(JSON.stringify(record));
    if (bytes > maxRecordBytes - 64) {
      throw new KvError(
        'CONFIG',
        `membership: the record of ${id} has ${bytes} bytes; shorten its names and addresses`,
      );
    }
    this.#list = new MemberList(options.redis);
    this.#running = this.#run();
  }

  get state(): Announced['state'] {
    return this.#state;
  }

  change(part: Changed): void {
    this.#record = { ...this.#record, ...part };
    this.#pause.end();
  }

  async drain(limitMs: number): Promise<void> {
    this.#record = { ...this.#record, draining: true };
    const told = new Promise<void>((resolve) => this.#onAnnounced.push(resolve)).then(() => true);
    this.#pause.end();
    let timer: NodeJS.Timeout | undefined;
    const limit = new Promise<boolean>((resolve) => {
      timer = setTimeout(() => resolve(false), limitMs);
    });
    const isTold = await Promise.race([told, limit]);
    clearTimeout(timer);
    if (isTold) await new Promise((resolve) => setTimeout(resolve, readersLookMs));
  }

  async close(): Promise<void> {
    if (this.#isClosed) return;
    this.#isClosed = true;
    this.#pause.end();
    // Who does not answer now will not in time: the lease ends by itself.
    if (this.#state === 'away') this.#list.close();
    await this.#running;
    try {
      if (this.#state !== 'away') await this.#list.remove(this.#id, this.#owner);
    } catch {
      // Likewise.
    }
    this.#list.close();
  }

  async #run(): Promise<void> {
    const { leaseMs } = this.#options;
    while (!this.#isClosed) {
      const beganMs = performance.now();
      let nextMs = leaseMs / renewalsPerLease;
      const waiting = this.#onAnnounced.splice(0);
      try {
        const lease = await this.#list.announce(this.#id, this.#owner, JSON.stringify(this.#record), leaseMs);
        this.#said(lease);
        if (lease.status === 'ok') for (const tell of waiting.splice(0)) tell();
      } catch (error) {
        nextMs = Math.min(nextMs, retryMs);
        this.#list.reset();
        this.#become('away', KvError.from(error).message);
      }
      this.#onAnnounced.push(...waiting);
      if (this.#isClosed) break;
      await this.#pause.wait(beganMs + nextMs - performance.now());
    }
  }

  #said({ status, endMs }: Lease): void {
    if (status === 'ok') {
      this.#othersEndMs = undefined;
      this.#become('announced', '');
    } else if (status === 'full') {
      this.#become(
        'refused',
        'the list of members is full; remove members, or give this cluster a keyPrefix of its own',
      );
    } else {
      // The one before us that was killed keeps the name for the rest of its lease: only who renews it lives.
      const isRenewed = this.#othersEndMs !== undefined && endMs > this.#othersEndMs;
      this.#othersEndMs = endMs;
      if (isRenewed) this.#become('refused', 'another living member has this name; give each member a name of its own');
    }
  }

  #become(state: Announced['state'], why: string): void {
    if (this.#isClosed) return;
    // Another state is told at once; of one that lasts, another reason.
    if (state !== this.#state) this.#reasons = new Reasons();
    if (!this.#reasons.isNews(why, performance.now())) return;
    this.#state = state;
    const { log } = this.#options;
    if (state === 'announced') log.info({ member: this.#id }, 'announced to the cluster');
    else if (state === 'refused') log.error({ member: this.#id, reason: why }, 'not announced to the cluster');
    else log.warn({ member: this.#id, reason: why }, 'the list of members cannot be reached');
  }
}
