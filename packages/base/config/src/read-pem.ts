/** Files with certificates, keys and secrets, as the configuration names them. */
import { readFileSync, statSync } from 'node:fs';
import { KvError } from '@kvtier/errors';

/** Others than its owner and its group. */
export const mayOthersRead = ({ mode }: { readonly mode: number }): boolean => (mode & 0o007) !== 0;

/**
 * A group may read a secret: so Kubernetes mounts one for a process that is not root. `what` has to be named instead of one that cannot
 * be used; `by`: what named it, in front of the line.
 * @throws KvError CONFIG: it cannot be read; or it is a secret, and others than its owner and its group may read it
 */
export function readPem(file: string, isSecret: boolean, what = 'a readable file', by = ''): Buffer {
  try {
    if (isSecret && mayOthersRead(statSync(file))) throw new Error('others may read it; chmod o-rwx it');
    return readFileSync(file);
  } catch (error) {
    throw new KvError('CONFIG', `${by}${file}: cannot be used (${(error as Error).message}); name ${what}`);
  }
}
