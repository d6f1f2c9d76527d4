/**
 * What a Redis tier is made with. `RedisSettings` is what `redisSchema` of @kvtier/config yields: plain data. Invariant: what
 * cannot work is a KvError CONFIG of one line, here or at the first connection, and never shows a password.
 */
import type { ArenaHandle } from '@kvtier/data-plane';
import type { Namespace } from '@kvtier/identity';
import type { RedisServers } from '@kvtier/redis';
import type { Clock, Log } from '@kvtier/runtime';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import type { ArenaSlots } from '../disk/options.ts';

/** What holds for the blocks of some namespaces. */
export interface RedisPolicy {
  /** Blocks are forgotten that long after they were written. */
  readonly ttlSeconds?: number | undefined;
  /** At most this part of the budget, 0 to 1. */
  readonly maxShare?: number | undefined;
  /** This node reads them and never writes them. */
  readonly readOnly?: boolean | undefined;
}

export interface RedisSettings extends RedisServers {
  /** Budget of all nodes that share these servers and this prefix. */
  readonly bytes: number;
  readonly keyPrefix: string;
  /** Parts of the directory, each on one server of a Cluster, each with its share of the budget. Default: 1, Cluster: 16. */
  readonly partitions?: number | undefined;
  readonly partBytes: number;
  /** Connections to one server for values, and commands in flight on one. */
  readonly connections: number;
  readonly depth: number;
  /** By the first digits (hex) of a namespace's digest; the longest match holds, else 'default'. */
  readonly policies: Readonly<Record<string, RedisPolicy>>;
}

/**
 * As `redisSchema` has them. A part and its header fill a size class of jemalloc. Each part costs the server some 10 µs in scripts and
 * round trips, so parts are large; reading goes in smaller pieces (native-pool.ts).
 */
export const defaultSettings = {
  mode: 'single',
  database: 0,
  keyPrefix: 'kvtier:',
  partBytes: 1_048_512,
  connections: 2,
  depth: 3,
  timeLimitMs: 2000,
  policies: {},
} as const;

export interface RedisTierOptions {
  readonly settings: RedisSettings;
  readonly arena: ArenaHandle;
  readonly memory: ArenaMemory;
  readonly slots: ArenaSlots;
  readonly log: Log;
  /** Of the ends of objects. Default: the system's. */
  readonly clock?: Clock;
  /** Open although no server answers now, out of service until one does. Default: refuse, so that a wrong address is noticed. */
  readonly openWithoutServer?: boolean;
  /** How often the changes of other nodes are asked for. */
  readonly pollMs?: number;
  /** How long a write may take before its reservation is given back by others. */
  readonly leaseMs?: number;
  /** Writes that may wait or be in flight; more are refused. */
  readonly maxPendingBytes?: number;
  /** Called at named steps; tests stop the process there. */
  readonly onStep?: (step: RedisStep) => void;
  /** 'node': values by Node's sockets, too, where they would move in native code. For simulations, which exchange those. */
  readonly transport?: 'native' | 'node';
}

/** Named steps of a write: reserved, all parts sent and answered, entry written. */
export type RedisStep = 'redis.write.reserved' | 'redis.write.parts' | 'redis.write.committed';

export function policyOf(policies: RedisSettings['policies'], namespace: Namespace): RedisPolicy {
  const digest = Buffer.from(namespace.digest).toString('hex');
  const names = Object.keys(policies).filter((name) => name !== 'default' && digest.startsWith(name));
  const longest = names.sort((a, b) => b.length - a.length)[0];
  return policies[longest ?? 'default'] ?? {};
}
