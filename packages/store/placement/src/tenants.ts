/**
 * Quotas: how many payload bytes a tenant may hold in a tier. A tenant over its quota makes room out of its own blocks,
 * coldest first, children before parents; other tenants never pay for it.
 *
 * Invariants: only tenants with a quota are counted, each block once per tier, for the tenant that made it (after a restart,
 * for the one that uses it first, in the arena); what is reserved or on its way counts like what is there. What a tier lists
 * without having been asked to (a disk that is back, with what it holds) counts too, and what is too much of it goes in the
 * same turn.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey, Namespace } from '@kvtier/identity';
import { roomAsks } from '@kvtier/tiers';
import { Account, TierRows } from './account.ts';
import type { Counters } from './counters.ts';
import { maxTenants } from './residency.ts';
import { noRow } from './row-rings.ts';

/** Whose blocks' sizes are known: far more than have sessions at one time. */
export const maxNamespaces = 4_096;

/** Bytes by tier name. */
export type Quota = Readonly<Record<string, number | undefined>>;
/** By tenant; "*" stands for every tenant that is not named. */
export type Quotas = Readonly<Record<string, Quota>>;

export interface TenantsOptions {
  readonly quotas: Quotas;
  /** By bit. */
  readonly tierNames: readonly string[];
  readonly counters: Counters;
  /** The number of a block's record in the index, the same for as long as a tier holds it; -1: none does. */
  readonly recordOf: (namespace: Namespace, hash: HashKey) => number;
  /** Of a block in the arena. */
  readonly parentOf: (namespace: Namespace, hash: HashKey) => HashKey | null;
  /** In the arena: elsewhere nothing is pinned. */
  readonly isPinned: (namespace: Namespace, hash: HashKey) => boolean;
  /** Let go of blocks of the arena that nobody wants any more, with `unpinned` of each that is free then. False: there are none. */
  readonly makeRoom: () => boolean;
  readonly evict: (bit: number, namespace: Namespace, hash: HashKey) => void;
}

export class Tenants {
  readonly #options: TenantsOptions;
  readonly #ids = new Map<string, number>();
  /** By tenant id, then tier bit. Id 0: everybody without a quota. */
  readonly #accounts: (Account | undefined)[][] = [[]];
  /** By bit. */
  readonly #tiers: readonly TierRows[];
  /** Payload bytes that are reserved or on their way, also of who has no quota. By bit. */
  readonly #reserved: number[];
  /** Payload bytes of a block, by namespace. */
  readonly #sizes = new Map<string, number>();
  /** Whose block is being published. */
  #publishing = 0;
  /** Accounts that hold more than they may, until the turn ends. */
  readonly #over = new Set<Account>();
  /** For whom room is being made, and whether a block of its own was unpinned meanwhile. */
  #asking: Account | undefined;
  #isHelped = false;

  constructor(options: TenantsOptions) {
    this.#options = options;
    this.#tiers = options.tierNames.map(() => new TierRows());
    this.#reserved = options.tierNames.map(() => 0);
  }

  /** A session of this tenant begins. Returns the tenant's number. KvError BUSY when there are too many tenants. */
  open(name: string, namespace: Namespace, payloadBytes: number): number {
    const { quotas } = this.#options;
    const quota = Object.hasOwn(quotas, name) ? quotas[name] : quotas['*']; // a tenant may call itself "constructor"
    if (quota === undefined) return 0;
    let id = this.#ids.get(name);
    if (id === undefined) {
      const tenant = this.#accounts.length;
      if (tenant === maxTenants) {
        throw new KvError('BUSY', `attach: ${maxTenants - 1} tenants have been here; start the cache node again`);
      }
      id = tenant;
      this.#ids.set(name, id);
      const accountOf = (tier: string, bit: number): Account | undefined =>
        quota[tier] === undefined ? undefined : new Account(tenant, bit, quota[tier], this.#tiers[bit]!);
      this.#accounts.push(this.#options.tierNames.map(accountOf));
    }
    this.#remember(namespace, payloadBytes);
    return id;
  }

  /** What this tenant may hold of a tier. */
  limitBytes(tenant: number, bit: number): number {
    return this.#accounts[tenant]![bit]?.limitBytes ?? Number.POSITIVE_INFINITY;
  }

  /** What is reserved or on its way, of everybody. */
  reservedBytes(bit: number): number {
    return this.#reserved[bit]!;
  }

  /** Of what this tenant may hold, half or more is reserved or on its way. */
  hasReservedHalf(tenant: number, bit: number): boolean {
    const account = this.#accounts[tenant]![bit];
    return account !== undefined && 2 * account.reservedBytes >= account.limitBytes;
  }

  /**
   * Room for one more block, out of the tenant's own ones if need be; it counts from now on. False: there is none. `isRefusal`: that is
   * counted.
   */
  reserve(tenant: number, bit: number, bytes: number, isRefusal = true): boolean {
    const account = this.#accounts[tenant]![bit];
    if (account !== undefined && !this.#makeRoomFor(account, bytes)) {
      if (isRefusal) this.#options.counters.add(`quota.refused.${this.#options.tierNames[bit]}`);
      return false;
    }
    if (account !== undefined) account.reservedBytes += bytes;
    this.#reserved[bit]! += bytes;
    return true;
  }

  /** Nobody pins this block of the arena any more. */
  unpinned(namespace: Namespace, hash: HashKey): void {
    if (this.#asking === undefined || this.#isHelped) return;
    this.#isHelped = this.#asking.rowOf(this.#options.recordOf(namespace, hash)) !== noRow;
  }

  /** What was reserved is there now, or will not come. */
  settle(tenant: number, bit: number, bytes: number): void {
    const account = this.#accounts[tenant]![bit];
    if (account !== undefined) account.reservedBytes -= bytes;
    this.#reserved[bit]! -= bytes;
  }

  /** Blocks that tiers list during `publish`, and that are nobody's yet, are this tenant's. */
  during(tenant: number, publish: () => void): void {
    this.#publishing = tenant;
    try {
      publish();
    } finally {
      this.#publishing = 0;
    }
  }

  /** Whose block is being published now; 0: nobody's in particular. */
  get publishing(): number {
    return this.#publishing;
  }

  /** `record`: the block's, in the index; `owner`: the tenant that is named there. */
  stored(bit: number, record: number, namespace: Namespace, hash: HashKey, owner: number): void {
    const account = this.#accounts[owner]![bit];
    const bytes = this.#sizes.get(namespace.key);
    if (account === undefined || bytes === undefined) return;
    const { recordOf, parentOf } = this.#options;
    this.#remember(namespace, bytes);
    const parent = parentOf(namespace, hash);
    account.add(record, namespace, hash, bytes, parent === null ? -1 : recordOf(namespace, parent));
    if (account.bytes <= account.limitBytes) return;
    // Not within this call: all followers of the tier are to hear that it holds the block before they hear that it does not.
    if (this.#over.size === 0) queueMicrotask(() => this.#trim());
    this.#over.add(account);
  }

  /** The record is still that of the block. */
  removed(bit: number, record: number): void {
    const tier = this.#tiers[bit]!;
    const row = tier.rows.find(record);
    if (row !== noRow) this.#accounts[tier.ownerOf(row)]![bit]!.remove(row);
  }

  /** As a whole: tenants may have millions of blocks in a disk, which goes in one turn. */
  cleared(bit: number): void {
    this.#tiers[bit]!.rows.clear();
    for (const accounts of this.#accounts) if (accounts[bit] !== undefined) accounts[bit].bytes = 0;
  }

  touch(bit: number, namespace: Namespace, hashes: readonly HashKey[]): void {
    const tier = this.#tiers[bit]!;
    if (tier.rows.count === 0) return;
    for (let at = hashes.length - 1; at >= 0; at--) tier.touch(this.#options.recordOf(namespace, hashes[at]!));
  }

  /** What came unasked and is too much goes. */
  #trim(): void {
    for (const account of this.#over) {
      while (account.bytes > account.limitBytes && this.#evictColdest(account));
    }
    this.#over.clear();
  }

  #makeRoomFor(account: Account, bytes: number): boolean {
    const asks = { left: account.bit === 0 ? roomAsks : 0 };
    while (account.bytes + account.reservedBytes + bytes > account.limitBytes)
      if (!this.#evictColdest(account) && !this.#makeRoomIn(account, asks)) return false;
    return true;
  }

  /** False: others have let go of no block of this account, so that there is no need of another look at all of them. */
  #makeRoomIn(account: Account, asks: { left: number }): boolean {
    this.#asking = account;
    this.#isHelped = false;
    while (!this.#isHelped && asks.left > 0 && this.#options.makeRoom()) asks.left--;
    this.#asking = undefined;
    return this.#isHelped;
  }

  /** False: nothing may go. */
  #evictColdest(account: Account): boolean {
    const { counters, isPinned, evict, tierNames } = this.#options;
    const { bit } = account;
    const { rows } = this.#tiers[bit]!;
    const victim = account.coldest((row) => bit !== 0 || !isPinned(rows.namespaceOf(row), rows.hashOf(row)));
    if (victim === undefined) return false;
    const [record, hash] = [rows.recordOf(victim), rows.hashOf(victim)];
    counters.add(`quota.evicted.${tierNames[bit]}`);
    evict(bit, rows.namespaceOf(victim), hash);
    // Unlisted, if the tier has not said so already.
    const left = account.rowOf(record);
    if (left !== noRow && rows.hashOf(left) === hash) account.remove(left);
    return true;
  }

  /** The namespaces that were used last; sessions of any number of others may come and go. */
  #remember({ key }: Namespace, payloadBytes: number): void {
    this.#sizes.delete(key);
    if (this.#sizes.size >= maxNamespaces) this.#sizes.delete(this.#sizes.keys().next().value!);
    this.#sizes.set(key, payloadBytes);
  }

  /** Bytes held, per tenant and tier, for stats. */
  gauges(): Record<string, number> {
    const gauges: Record<string, number> = {};
    for (const [name, id] of this.#ids) {
      for (const [bit, account] of this.#accounts[id]!.entries()) {
        if (account !== undefined) gauges[`quota.bytes.${this.#options.tierNames[bit]}.${name}`] = account.bytes;
      }
    }
    return gauges;
  }
}
