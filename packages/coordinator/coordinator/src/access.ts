/** Files that open workers beyond loopback, read once at start. */
import { readFileSync } from 'node:fs';
import type { CoordinatorConfig } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { Access } from '@kvtier/registry';

/** @throws KvError CONFIG: a file that cannot be read */
export function readAccess(config: NonNullable<CoordinatorConfig['access']>): Access {
  const { caFile, certFile, keyFile, tokenFile, serverName } = config;
  return {
    ca: read(caFile),
    cert: read(certFile),
    key: read(keyFile),
    serverName,
    token: read(tokenFile)?.toString('utf8').trim(),
  };
}

function read(path: string | undefined): Buffer | undefined {
  if (path === undefined) return undefined;
  try {
    return readFileSync(path);
  } catch (error) {
    throw new KvError('CONFIG', `access: ${path}: cannot be read (${(error as Error).message}); name a readable file`);
  }
}
