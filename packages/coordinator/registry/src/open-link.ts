/**
 * How a worker is reached. On a Unix socket or on loopback as it stands; beyond, only with TLS and with something that proves who we are:
 * a certificate (kvtier), a certificate or a bearer token (openai), or as it stands where the network is said to be trusted (openai).
 */
import { originAt, type WorkerRecord } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { isLocal, type TlsFiles } from '@kvtier/wire/grpc';
import { KvtierLink } from './kvtier-link.ts';
import type { Access, Link, LinkHost, LinkTimes } from './link.ts';
import { OpenaiLink } from './openai-link.ts';

export interface OpenLinkOptions {
  readonly record: WorkerRecord;
  readonly host: LinkHost;
  readonly sender: string;
  readonly times: LinkTimes;
  readonly media: readonly string[];
  readonly access: Access | undefined;
}

/** @throws KvError CONFIG: it may not be reached so, or its address is none */
export function openLink({ record, host, sender, times, media, access }: OpenLinkOptions): Link {
  const { name, kind, address } = record;
  if (kind === 'openai') return new OpenaiLink({ name, origin: originOf(record, access), access, host, times });
  if (!/^(unix:\/.+|(\[[0-9a-fA-F:]+\]|[^\s:/]+):\d{1,5})$/.test(address)) {
    throw new KvError('CONFIG', `worker ${name}: ${address} is no address; give unix:/PATH or HOST:PORT`);
  }
  return new KvtierLink({ name, address, host, sender, times, media, tls: tlsOf(record, access) });
}

function tlsOf({ name, address }: WorkerRecord, access: Access | undefined): TlsFiles | undefined {
  if (isLocal(address)) return undefined;
  // As it stands: what its files hold may change.
  if (access?.ca && access.cert && access.key) return access as TlsFiles;
  const missing = 'is beyond loopback, where TLS and a certificate of ours are needed';
  throw new KvError('CONFIG', `worker ${name}: ${address} ${missing}; configure caFile, certFile and keyFile`);
}

function originOf({ name, address }: WorkerRecord, access: Access | undefined): URL {
  const url = originAt(address);
  if (url === undefined)
    throw new KvError('CONFIG', `worker ${name}: ${address} is no address; give http://HOST:PORT or https://HOST:PORT`);
  if (isLocal(url.host) || access?.trustedNetwork) return url;
  if (url.protocol === 'https:' && ((access?.cert && access.key) || access?.token)) return url;
  const missing = 'is beyond loopback, where TLS and a token or a certificate of ours are needed';
  const remedy = 'use https and configure tokenFile or certFile, or say "access": {"trustedNetwork": true}';
  throw new KvError('CONFIG', `worker ${name}: ${address} ${missing}; ${remedy}`);
}
