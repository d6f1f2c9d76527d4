/** Files with certificates, keys and secrets, as the configuration names them. */
import { readFileSync, statSync } from 'node:fs';
import { KvError } from '@kvtier/errors';

export interface NamedFile {
  readonly path: string;
  readonly isSecret: boolean;
  /** The configuration's, that names it: for the line of a start that fails. */
  readonly key?: string;
  /** Of a secret: these bytes are none, and what they are is told by who takes them, instead of who may read them. */
  readonly isNoSecret?: (bytes: Buffer) => boolean;
}

/** What is wrong with one of several files, where that is known. */
export class FileProblem extends Error {
  readonly at: number;
  readonly remedy: string;

  /** `at`: its place among them. `remedy`: what has to be named instead. */
  constructor(at: number, what: string, remedy: string) {
    super(what);
    this.at = at;
    this.remedy = remedy;
  }
}

/** Others than its owner and its group. */
export const mayOthersRead = ({ mode }: { readonly mode: number }): boolean => (mode & 0o007) !== 0;

/**
 * A group may read a secret: so Kubernetes mounts one for a process that is not root. `what` has to be named instead of one that cannot
 * be used.
 * @throws KvError CONFIG: it cannot be read; or it is a secret, and others than its owner and its group may read it
 */
export function readPem({ path, isSecret, key, isNoSecret }: NamedFile, what = 'a readable file'): Buffer {
  try {
    const isOpen = isSecret && mayOthersRead(statSync(path));
    const bytes = readFileSync(path);
    if (isOpen && !isNoSecret?.(bytes)) throw new Error('others may read it; chmod o-rwx it');
    return bytes;
  } catch (error) {
    throw new KvError('CONFIG', `${by(key)}${path}: cannot be used (${(error as Error).message}); name ${what}`);
  }
}

/** In front of a line. */
export const by = (key: string | undefined): string => (key === undefined ? '' : `${key}: `);
