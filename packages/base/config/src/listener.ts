/**
 * What listens on an address, and who gets in there. Invariant: beyond loopback it speaks TLS and asks who comes, for a certificate or a
 * key, unless the configuration says that the network is trusted.
 */
import { existsSync } from 'node:fs';
import { isIP } from 'node:net';
import { dirname } from 'node:path';
import { KvError } from '@kvtier/errors';
import * as z from 'zod';

export const milliseconds = z.number().int().min(1).max(86_400_000);
const file = z.string().min(1);

export const ip = z.string().refine((host) => isIP(host) !== 0, 'an IP address');
/** 0: any free one. */
export const port = z.number().int().min(0).max(65535);
/** Of an HTTP server, which may listen where a name says "this machine". */
export const httpHost = z
  .string()
  .refine((host) => host === 'localhost' || isIP(host) !== 0, 'an IP address, or localhost');
export const isLoopback = (host: string): boolean =>
  host === '::1' || host === 'localhost' || /^(::ffff:)?127\.\d+\.\d+\.\d+$/.test(host);

/** "unix:/PATH" or "HOST:PORT", where an engine worker listens or is reached. */
export const isGrpcAddress = (address: string): boolean =>
  /^(unix:.+|[^:/]+:\d{1,5}|\[[\da-fA-F:.]+\]:\d{1,5})$/.test(address);

/** "http://HOST:PORT" or "https://HOST:PORT", where a server of OpenAI's API is reached; undefined: it is none. */
export function originAt(address: string): URL | undefined {
  if (!URL.canParse(address)) return undefined;
  const url = new URL(address);
  const isOrigin = ['http:', 'https:'].includes(url.protocol) && url.pathname === '/' && url.search + url.hash === '';
  return isOrigin ? url : undefined;
}

/** What a server makes on its way to the socket tells of a path that nobody has written. @throws KvError IO */
export function checkSocketFolder(key: string, address: string): void {
  const folder = address.startsWith('unix:') ? dirname(address.slice('unix:'.length)) : '/';
  if (existsSync(folder)) return;
  throw new KvError('IO', `${key}: ${address}: folder ${folder} does not exist; make it, or name another`);
}

/** Of a server. PEM files; they are read again when they change. */
export const serverTlsSchema = z.strictObject({
  certFile: file,
  keyFile: file,
  /** Authorities of the clients' certificates; null: a client shows none. */
  clientCaFile: file.nullable().default(null),
  reloadMs: milliseconds.default(10_000),
});
export type ServerTlsConfig = z.infer<typeof serverTlsSchema>;

export interface Listener {
  readonly host: string;
  readonly tls: ServerTlsConfig | null;
  readonly trustedNetwork: boolean;
  /** A file with keys, one of which each client sends; null or absent: they send none. */
  readonly apiKeysFile?: string | null;
}

/** Beyond loopback: TLS, and a certificate or a key of who asks. `whose`: authority, "the gateways'". */
export function checkListener(listener: Listener, context: z.RefinementCtx, whose: string, remedy = ''): void {
  const { host, tls, trustedNetwork, apiKeysFile = null } = listener;
  const issue = (path: string[], message: string): void => context.addIssue({ code: 'custom', path, message });
  if (isLoopback(host)) return;
  if (tls === null) issue(['tls'], `${host} is not loopback: name certFile and keyFile${remedy}`);
  else if (tls.clientCaFile === null && apiKeysFile === null && !trustedNetwork) {
    const keys = listener.apiKeysFile === undefined ? '' : ' or an apiKeysFile';
    const message = `${host} is not loopback: name ${whose} authority${keys}, or say "trustedNetwork": true`;
    issue(['tls', 'clientCaFile'], message);
  }
}

/** HTTP is what an ingress, a mesh or a probe speaks in plain text: a trusted network needs no TLS for it either. */
export function checkHttpListener(listener: Listener, context: z.RefinementCtx, whose: string): void {
  if (!listener.trustedNetwork) checkListener(listener, context, whose, ', or say "trustedNetwork": true');
}
