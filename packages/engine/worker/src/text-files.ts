/** What an engine worker says of the tokenizer and the chat template that lie in its model's folder. It uses neither. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { type TextFile, textDigestOf, tokenFiles } from '@kvtier/identity';

export interface TextDigests {
  readonly textDigest: string;
  /** Of what says what each id means. */
  readonly tokenDigest: string;
}

/** To be called while the model is loaded: what changes meanwhile is noticed then. @throws KvError MODEL */
export function readTextDigests(modelDir: string): TextDigests {
  const contents = new Map<TextFile, Uint8Array | undefined>();
  const contentOf = (name: TextFile): Uint8Array | undefined => {
    if (!contents.has(name)) contents.set(name, read(name));
    return contents.get(name);
  };
  const read = (name: TextFile): Uint8Array | undefined => {
    const path = join(modelDir, name);
    try {
      return readFileSync(path);
    } catch (error) {
      const { code, message } = error as NodeJS.ErrnoException;
      if (code === 'ENOENT') return undefined;
      throw new KvError('MODEL', `${path}: cannot be read (${message}); check its permissions`);
    }
  };
  return { textDigest: textDigestOf(contentOf), tokenDigest: textDigestOf(contentOf, tokenFiles) };
}
