/** Files with certificates, keys and secrets, as the configuration names them. */
import { readFileSync, statSync } from 'node:fs';
import { KvError } from '@kvtier/errors';

/** @throws KvError CONFIG: it cannot be read; or it is a secret, and others may read it */
export function readPem(file: string, isSecret: boolean): Buffer {
  try {
    const open = statSync(file).mode & 0o077;
    if (isSecret && open !== 0) throw new Error('others may read it; chmod 600 it');
    return readFileSync(file);
  } catch (error) {
    throw new KvError(
      'CONFIG',
      `${file}: cannot be used (${(error as Error).message}); name a readable file of mode 0600`,
    );
  }
}
