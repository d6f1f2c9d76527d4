/** What an S3 tier is made with, and how its budget is divided into packs. */
import type { ArenaHandle } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { Log } from '@kvtier/runtime';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import type { ArenaSlots } from '../disk/options.ts';
import { type S3SecretSettings, S3Secrets } from './secrets.ts';

/** As configured (packages/base/config/src/s3.ts); what is absent has a default. */
export interface S3Settings extends S3SecretSettings {
  readonly bucket: string;
  /** Budget of all nodes that share the bucket and the prefix. */
  readonly bytes: number;
  /** Absent: Amazon's, by region. */
  readonly endpoint?: string | undefined;
  readonly region?: string | undefined;
  /** Begins every key; the tier touches nothing else. */
  readonly prefix?: string | undefined;
  /** The bucket in the path; default: yes for an endpoint of one's own, no for Amazon's. */
  readonly pathStyle?: boolean | undefined;
  /** The largest pack; at least the largest object and its table. */
  readonly packBytes?: number | undefined;
  /** Packs older than this go. */
  readonly ttlSeconds?: number | undefined;
  readonly connections?: number | undefined;
  /** For one read or write, with all its tries. */
  readonly timeLimitMs?: number | undefined;
  /** Without a byte moved, one try ends. */
  readonly idleLimitMs?: number | undefined;
  /** How long a block may wait for others that fill its pack. */
  readonly flushMs?: number | undefined;
  /** How often the bucket is listed, about. */
  readonly refreshMs?: number | undefined;
  /** Blocks that are listed; those of packs beyond them are not found. */
  readonly maxBlocks?: number | undefined;
}

export interface S3TierOptions extends S3Settings {
  readonly arena: ArenaHandle;
  readonly memory: ArenaMemory;
  readonly slots: ArenaSlots;
  readonly log: Log;
  /** Nothing is ever written: no permission and no room is asked for. What is to go is deleted, if it may be. */
  readonly isReadOnly?: boolean | undefined;
}

/** One block of 32 MiB with its header and table, or many smaller ones. */
const defaultPackBytes = 33 << 20;
/** Kept out of the packs' share, for the settings object. */
const metadataBytes = 4096;
const minPackBytes = 4096;
/** Keys have eight digits, and a listing of so many takes a thousand requests. */
const maxPackCount = 1_000_000;

export const s3Defaults = {
  region: 'us-east-1',
  prefix: 'kvtier/',
  connections: 16,
  timeLimitMs: 15_000,
  idleLimitMs: 5_000,
  flushMs: 100,
  refreshMs: 10_000,
  maxBlocks: 4 << 20,
} as const;

/** Blocks that wait for their pack to be stored; beyond this writes are refused. */
export const maxPendingBytes = 512 << 20;

export type S3Plan = ReturnType<typeof planS3>;

/** Defaults filled in. KvError CONFIG when it cannot work. Whoever uses it closes its `secrets`. */
export function planS3(settings: S3Settings) {
  const { bytes: capacityBytes, bucket } = settings;
  const packBytes = settings.packBytes ?? defaultPackBytes;
  const packCount = Math.floor((capacityBytes - metadataBytes) / packBytes);
  if (packCount < 1 || packBytes < minPackBytes) {
    throw new KvError(
      'CONFIG',
      `s3: ${capacityBytes} bytes hold no pack of ${packBytes} (at least ${minPackBytes}) beside ${metadataBytes} bytes of settings; raise the s3 tier's bytes or lower packBytes`,
    );
  }
  if (packCount > maxPackCount) {
    throw new KvError('CONFIG', `s3: ${packCount} packs are more than ${maxPackCount}; raise packBytes`);
  }
  const region = settings.region ?? s3Defaults.region;
  const url = endpointOf(settings.endpoint ?? `https://s3.${region}.amazonaws.com`);
  const prefix = settings.prefix ?? s3Defaults.prefix;
  return {
    ...{ url, region, bucket, prefix: prefix === '' || prefix.endsWith('/') ? prefix : `${prefix}/` },
    ...{ capacityBytes, packBytes, packCount },
    pathStyle: settings.pathStyle ?? settings.endpoint !== undefined,
    secrets: new S3Secrets(settings),
    ttlMs: (settings.ttlSeconds ?? Number.POSITIVE_INFINITY) * 1000,
    maxConnections: settings.connections ?? s3Defaults.connections,
    timeLimitMs: settings.timeLimitMs ?? s3Defaults.timeLimitMs,
    idleLimitMs: settings.idleLimitMs ?? s3Defaults.idleLimitMs,
    flushMs: settings.flushMs ?? s3Defaults.flushMs,
    refreshMs: settings.refreshMs ?? s3Defaults.refreshMs,
    maxBlocks: settings.maxBlocks ?? s3Defaults.maxBlocks,
  };
}

/** What can be told before any server is asked. @throws KvError CONFIG as `planS3` */
export const checkS3 = (settings: S3Settings): void => planS3(settings).secrets.close();

function endpointOf(text: string): URL {
  const url = URL.canParse(text) ? new URL(text) : undefined;
  const sound = url !== undefined && /^https?:$/.test(url.protocol) && url.pathname === '/' && url.search === '';
  if (!sound || url.username !== '') {
    throw new KvError('CONFIG', `s3: endpoint ${JSON.stringify(text)} is not a URL like https://host:port; correct it`);
  }
  return url;
}
