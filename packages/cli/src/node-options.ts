/**
 * The options of `kvtier up` that configure more of the cache node: tiers that nodes share, and a file for everything else. Invariant:
 * what `kvtier up` decides itself (socket, data folder, arena, disk, log level) cannot be set here; the node checks the rest.
 */
import { readFileSync } from 'node:fs';
import { type CacheNodeInput, groupSchema, parseJson } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { parseBytes } from './bytes.ts';
import { miswritten } from './miswritten.ts';

export type NodeOverrides = Partial<Omit<CacheNodeInput, (typeof ownKeys)[number]>>;

export interface NodeFlags {
  readonly redis?: string | undefined;
  readonly 'redis-bytes'?: string | undefined;
  readonly s3?: string | undefined;
  readonly 's3-bytes'?: string | undefined;
  readonly group?: string | undefined;
  readonly 'node-config'?: string | undefined;
  readonly 'no-tier'?: boolean | undefined;
}

const ownKeys = ['socketPath', 'dataDir', 'arena', 'disk', 'logLevel'] as const;
const minBytes = 2 ** 20;

/** @throws KvError CONFIG */
export function nodeOverrides(flags: NodeFlags): NodeOverrides {
  const names = ['redis', 'redis-bytes', 's3', 's3-bytes', 'group', 'node-config'] as const;
  const given = names.find((name) => flags[name] !== undefined);
  if (flags['no-tier'] && given) throw miswritten(`--${given}: there is no cache node with --no-tier; drop one`);
  const file = flags['node-config'] === undefined ? {} : readOverrides(flags['node-config']);
  return { ...file, ...redisOf(flags, file), ...s3Of(flags, file), ...groupOf(flags, file) };
}

/** By number, where it is one: names are each container's own. */
function groupOf({ group }: NodeFlags, file: NodeOverrides): NodeOverrides {
  if (group === undefined) return {};
  if (file.group != null) throw miswritten('--group: the file of --node-config has "group", too; give one of them');
  const named = groupSchema.safeParse(/^\d+$/.test(group) ? Number(group) : group);
  if (!named.success) throw miswritten(`--group: "${group}" is no group; write its name or number`);
  return { group: named.data };
}

function redisOf(flags: NodeFlags, file: NodeOverrides): NodeOverrides {
  const { redis: url, 'redis-bytes': size } = flags;
  if (url === undefined) return without(size, '--redis-bytes', '--redis');
  if (file.redis) throw miswritten('--redis: the file of --node-config has "redis", too; give one of them');
  if (!/^(rediss?:\/\/[^/@]+|unix:\/.+)\/?$/.test(url)) {
    // A password in a command line can be read by everybody on the machine.
    throw miswritten(
      '--redis: write redis://HOST:PORT, rediss://HOST:PORT or unix:/PATH; a password goes into the file of --node-config',
    );
  }
  return { redis: { servers: [url], bytes: parseBytes(size ?? '1GiB', '--redis-bytes', minBytes) } };
}

function s3Of(flags: NodeFlags, file: NodeOverrides): NodeOverrides {
  const { s3: text, 's3-bytes': size } = flags;
  if (text === undefined) return without(size, '--s3-bytes', '--s3');
  if (file.s3) throw miswritten('--s3: the file of --node-config has "s3", too; give one of them');
  const [, endpoint, bucket] = /^(https?:\/\/[^/?#@]+)\/([^/?#]+)\/?$/.exec(text) ?? [];
  if (endpoint === undefined || bucket === undefined) {
    throw miswritten(`--s3: "${text}" is no place of a bucket; write https://HOST:PORT/BUCKET`);
  }
  return { s3: { endpoint, bucket, bytes: parseBytes(size ?? '8GiB', '--s3-bytes', minBytes) } };
}

function without(size: string | undefined, option: string, of: string): NodeOverrides {
  if (size !== undefined) throw miswritten(`${option}: goes with ${of}; give it, too`);
  return {};
}

function readOverrides(file: string): NodeOverrides {
  let text: string;
  try {
    text = readFileSync(file, 'utf8');
  } catch (error) {
    throw new KvError(
      'CONFIG',
      `--node-config: ${file} cannot be read (${(error as Error).message}); name a JSON file`,
    );
  }
  const value = parseJson(text, `--node-config: ${file}`);
  if (typeof value !== 'object' || value === null || Array.isArray(value)) {
    throw miswritten(`--node-config: ${file} is no JSON object; write {"redis": ...}`);
  }
  const own = ownKeys.find((key) => Object.hasOwn(value, key));
  if (own) throw miswritten(`--node-config: ${file}: kvtier up sets "${own}" itself; remove it (docs/operating.md)`);
  return value as NodeOverrides;
}
