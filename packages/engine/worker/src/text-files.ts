/** What an engine worker says of the tokenizer and the chat template that lie in its model's folder. It uses neither. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { textDigestOf } from '@kvtier/identity';

/** To be called while the model is loaded: what changes meanwhile is noticed then. @throws KvError MODEL */
export const readTextDigest = (modelDir: string): string =>
  textDigestOf((name) => {
    const path = join(modelDir, name);
    try {
      return readFileSync(path);
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      if (code === 'ENOENT') return undefined;
      throw new KvError('MODEL', `${path}: cannot be read (${message}); check its permissions`);
    }
  });
