/**
 * The options of `kvtier up` that say where its API server listens and who is answered there. Invariant: beyond loopback exactly what the
 * coordinator's configuration lets in, told in the names of the options, before anything is started.
 */
import { accessSync, constants } from 'node:fs';
import { resolve } from 'node:path';
import { type CoordinatorInput, coordinatorSchema } from '@kvtier/config';
import { RenewedFiles } from '@kvtier/config/files';
import { pemFile, pemsIn } from '@kvtier/config/pems';
import { KvError } from '@kvtier/errors';
import { miswritten } from './miswritten.ts';

/** As the coordinator's configuration has it. */
export type ApiServerPlace = Pick<CoordinatorInput, 'tls' | 'apiKeysFile' | 'adminKeysFile' | 'trustedNetwork'> & {
  readonly host: string;
};

const files = ['tls-cert', 'tls-key', 'tls-client-ca', 'api-keys', 'admin-keys'] as const;

export type ApiFlags = Readonly<Partial<Record<'host' | (typeof files)[number], string>>> & {
  readonly 'trusted-network'?: boolean | undefined;
};

export const apiFlagTypes = {
  host: { type: 'string' },
  'tls-cert': { type: 'string' },
  'tls-key': { type: 'string' },
  'tls-client-ca': { type: 'string' },
  'api-keys': { type: 'string' },
  'admin-keys': { type: 'string' },
  'trusted-network': { type: 'boolean' },
} as const;

export const apiHelp = `\
  --host ADDRESS       where the API server listens (127.0.0.1); beyond loopback with TLS and keys, or --trusted-network
  --tls-cert FILE      certificate of the API server (PEM), read again when it is renewed; with --tls-key
  --tls-key FILE       its private key
  --tls-client-ca FILE only clients with a certificate of it are let in
  --api-keys FILE      keys, one a line: requests bear one of them
  --admin-keys FILE    keys for /admin (any of --api-keys)
  --trusted-network    beyond loopback in plain text and without keys, too: behind an ingress or a mesh that does both`;

/** @throws KvError CONFIG */
export function apiServerPlace(flags: ApiFlags): ApiServerPlace {
  const { host = '127.0.0.1', 'tls-cert': cert, 'tls-key': key, 'tls-client-ca': clientCa } = flags;
  const alone = cert === undefined ? (['tls-key', 'tls-client-ca'] as const).find((name) => flags[name]) : undefined;
  if (alone) throw miswritten(`--${alone}: goes with --tls-cert; give it, too`);
  if (cert !== undefined && key === undefined) throw miswritten('--tls-cert: goes with --tls-key; give it, too');
  for (const name of files) checkReadable(name, flags[name]);
  const tls = cert === undefined || key === undefined ? null : { certFile: resolve(cert), keyFile: resolve(key) };
  const place: ApiServerPlace = {
    host,
    tls: tls && { ...tls, ...(clientCa !== undefined && { clientCaFile: resolve(clientCa) }) },
    apiKeysFile: resolved(flags['api-keys']),
    adminKeysFile: resolved(flags['admin-keys']),
    trustedNetwork: flags['trusted-network'] === true,
  };
  const refused = coordinatorSchema.safeParse({ ...place, port: 0 }).error?.issues[0];
  if (refused === undefined) return place;
  if (refused.path[0] === 'host') throw miswritten(`--host: "${host}" is not ${refused.message}`);
  const missing =
    tls === null ? '--tls-cert and --tls-key, and --api-keys or --tls-client-ca' : '--api-keys or --tls-client-ca';
  throw miswritten(`--host: ${host} is not loopback; give ${missing}, or say --trusted-network`);
}

/** What the coordinator would refuse, told in the names of the options. @throws KvError CONFIG */
export function checkTls({ tls }: ApiServerPlace): void {
  if (!tls) return;
  const files = [pemFile('cert', '--tls-cert', tls.certFile), pemFile('key', '--tls-key', tls.keyFile)];
  if (tls.clientCaFile) files.push(pemFile('ca', '--tls-client-ca', tls.clientCaFile));
  new RenewedFiles({
    files,
    make: (bytes) => pemsIn(files, bytes),
    file: 'a readable PEM file',
    content: 'a certificate and its key (PEM)',
    ...{ reloadMs: 86_400_000, onProblem: () => {} },
  }).close();
}

const resolved = (file: string | undefined): string | null => (file === undefined ? null : resolve(file));

function checkReadable(name: string, file: string | undefined): void {
  if (file === undefined) return;
  try {
    accessSync(file, constants.R_OK);
  } catch (error) {
    throw new KvError('CONFIG', `--${name}: cannot be read (${(error as Error).message}); name a readable file`);
  }
}
