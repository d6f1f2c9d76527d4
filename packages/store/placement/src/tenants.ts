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
import { createPolicy, type EvictionPolicy } from '@kvtier/eviction';
import type { HashKey, Namespace } from '@kvtier/identity';
import { roomAsks, victimPassingOver } from '@kvtier/tiers';
import type { Counters } from './counters.ts';
import { maxTenants } from './residency.ts';

/** Whose blocks' sizes are known: far more than have sessions at one time. */
export const maxNamespaces = 4_096;

/** Bytes by tier name. */
export type Quota = Readonly<Record<string, number | undefined>>;
/** By tenant; "*" stands for every tenant that is not named. */
export type Quotas = Readonly<Record<string, Quota>>;

interface Entry {
  readonly namespace: Namespace;
  readonly hash: HashKey;
  readonly bytes: number;
}

/** One tenant in one tier. */
class Account {
  readonly bit: number;
  readonly limitBytes: number;
  /** Held. */
  bytes = 0;
  reservedBytes = 0;
  #policy: EvictionPolicy = createPolicy('lru');
  readonly #entries: (Entry | undefined)[] = [];
  readonly #free: number[] = [];
  readonly #byName = new Map<string, number>();

  constructor(bit: number, limitBytes: number) {
    this.bit = bit;
    this.limitBytes = limitBytes;
  }

  add(entry: Entry, parent: HashKey | null): void {
    const { namespace, hash, bytes } = entry;
    if (this.#byName.has(namespace.key + hash)) return;
    const index = this.#free.pop() ?? this.#entries.length;
    this.#entries[index] = entry;
    this.#byName.set(namespace.key + hash, index);
    this.#policy.insert(index, 0, { parent: parent === null ? undefined : this.#byName.get(namespace.key + parent) });
    this.bytes += bytes;
  }

  remove(namespace: Namespace, hash: HashKey): void {
    const index = this.#byName.get(namespace.key + hash);
    if (index === undefined) return;
    this.#byName.delete(namespace.key + hash);
    this.bytes -= this.#entries[index]!.bytes;
    this.#entries[index] = undefined;
    this.#policy.remove(index);
    this.#free.push(index);
  }

  has(namespace: Namespace, hash: HashKey): boolean {
    return this.#byName.has(namespace.key + hash);
  }

  touch(namespace: Namespace, hash: HashKey): void {
    const index = this.#byName.get(namespace.key + hash);
    if (index !== undefined) this.#policy.touch(index, 0);
  }

  /** What is pinned for long is passed over once, not with each reservation. */
  coldest(mayGo: (entry: Entry) => boolean): Entry | undefined {
    const index = victimPassingOver(this.#policy, { mayGo: (candidate) => mayGo(this.#entries[candidate]!) });
    return index === undefined ? undefined : this.#entries[index];
  }

  /** As a whole: a tenant may have millions of blocks in a disk, which goes in one turn. */
  clear(): void {
    if (this.#byName.size === 0) return;
    this.#byName.clear();
    this.#entries.length = 0;
    this.#free.length = 0;
    this.#policy = createPolicy('lru');
    this.bytes = 0;
  }
}

export interface TenantsOptions {
  readonly quotas: Quotas;
  /** By bit. */
  readonly tierNames: readonly string[];
  readonly counters: Counters;
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
  }

  /** A session of this tenant begins. Returns the tenant's number. KvError BUSY when there are too many tenants. */
  open(name: string, namespace: Namespace, payloadBytes: number): number {
    const { quotas } = this.#options;
    const quota = Object.hasOwn(quotas, name) ? quotas[name] : quotas['*']; // a tenant may call itself "constructor"
    if (quota === undefined) return 0;
    let id = this.#ids.get(name);
    if (id === undefined) {
      id = this.#accounts.length;
      if (id === maxTenants) {
        throw new KvError('BUSY', `attach: ${maxTenants - 1} tenants have been here; start the cache node again`);
      }
      this.#ids.set(name, id);
      this.#accounts.push(
        this.#options.tierNames.map((tier, bit) =>
          quota[tier] === undefined ? undefined : new Account(bit, quota[tier]),
        ),
      );
    }
    this.#remember(namespace, payloadBytes);
    return id;
  }

  /** What this tenant may hold of a tier. */
  limitBytes(tenant: number, bit: number): number {
    return this.#accounts[tenant]![bit]?.limitBytes ?? Number.POSITIVE_INFINITY;
  }

  /** Room for one more block, out of the tenant's own ones if need be; it counts from now on. False: refused, counted. */
  reserve(tenant: number, bit: number, bytes: number): boolean {
    const account = this.#accounts[tenant]![bit];
    if (account === undefined) return true;
    const asks = { left: bit === 0 ? roomAsks : 0 };
    while (account.bytes + account.reservedBytes + bytes > account.limitBytes) {
      if (this.#evictColdest(account) || this.#makeRoomIn(account, asks)) continue;
      this.#options.counters.add(`quota.refused.${this.#options.tierNames[bit]}`);
      return false;
    }
    account.reservedBytes += bytes;
    return true;
  }

  /** Nobody pins this block of the arena any more. */
  unpinned(namespace: Namespace, hash: HashKey): void {
    this.#isHelped ||= this.#asking?.has(namespace, hash) ?? false;
  }

  /** What was reserved is there now, or will not come. */
  settle(tenant: number, bit: number, bytes: number): void {
    const account = this.#accounts[tenant]![bit];
    if (account !== undefined) account.reservedBytes -= bytes;
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

  /** `owner`: the tenant that the index names. */
  stored(bit: number, namespace: Namespace, hash: HashKey, owner: number): void {
    const account = this.#accounts[owner]![bit];
    const bytes = this.#sizes.get(namespace.key);
    if (account === undefined || bytes === undefined) return;
    this.#remember(namespace, bytes);
    account.add({ namespace, hash, bytes }, this.#options.parentOf(namespace, hash));
    if (account.bytes <= account.limitBytes) return;
    // Not within this call: all followers of the tier are to hear that it holds the block before they hear that it does not.
    if (this.#over.size === 0) queueMicrotask(() => this.#trim());
    this.#over.add(account);
  }

  removed(bit: number, namespace: Namespace, hash: HashKey, owner: number): void {
    this.#accounts[owner]?.[bit]?.remove(namespace, hash);
  }

  cleared(bit: number): void {
    for (const accounts of this.#accounts) accounts[bit]?.clear();
  }

  touch(bit: number, namespace: Namespace, hashes: readonly HashKey[], owner: (hash: HashKey) => number): void {
    if (this.#accounts.length === 1) return;
    for (let at = hashes.length - 1; at >= 0; at--) {
      this.#accounts[owner(hashes[at]!)]![bit]?.touch(namespace, hashes[at]!);
    }
  }

  /** What came unasked and is too much goes. */
  #trim(): void {
    for (const account of this.#over) {
      while (account.bytes > account.limitBytes && this.#evictColdest(account));
    }
    this.#over.clear();
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
    const victim = account.coldest(({ namespace, hash }) => bit !== 0 || !isPinned(namespace, hash));
    if (victim === undefined) return false;
    counters.add(`quota.evicted.${tierNames[bit]}`);
    evict(bit, victim.namespace, victim.hash);
    account.remove(victim.namespace, victim.hash); // unlisted, if the tier has not said so already
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
