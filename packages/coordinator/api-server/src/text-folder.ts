/** The text files of a model folder, each read once: what is compared with a worker's word is what is used. */
import { readFileSync } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { type TextFile, textDigestOf } from '@kvtier/identity';

export class TextFolder {
  readonly #dir: string;
  /** undefined: there is none. */
  readonly #contents = new Map<TextFile, Buffer | undefined>();

  constructor(dir: string) {
    this.#dir = dir;
  }

  pathOf(name: TextFile): string {
    return join(this.#dir, name);
  }

  /** @throws KvError MODEL when the files here are others than those of `digest` */
  compare(digest: string): void {
    const own = textDigestOf((name) => this.#read(name));
    if (own === digest) return;
    throw new KvError(
      'MODEL',
      `${this.#dir}: tokenizer and chat template have digest ${own.slice(0, 16)}, the model's workers loaded beside ` +
        `${digest.slice(0, 16)}; put those files back, or restart the workers`,
    );
  }

  /** 0: there is none. @throws KvError MODEL */
  bytesOf(name: TextFile): number {
    return this.#read(name)?.length ?? 0;
  }

  /** undefined: there is none. @throws KvError MODEL */
  text(name: TextFile): string | undefined {
    return this.#read(name)?.toString('utf8');
  }

  /** {}: there is none, and none is required. @throws KvError MODEL */
  json(name: TextFile, required = false): Record<string, unknown> {
    const path = this.pathOf(name);
    const text = this.text(name);
    if (text === undefined) {
      if (required) throw unreadable(path, 'ENOENT');
      return {};
    }
    let value: unknown;
    try {
      value = JSON.parse(text);
    } catch {
      throw new KvError('MODEL', `${path}: not valid JSON, perhaps cut off; copy the file again`);
    }
    if (typeof value !== 'object' || value === null || Array.isArray(value)) {
      throw new KvError('MODEL', `${path}: not a JSON object; copy the file again`);
    }
    return value as Record<string, unknown>;
  }

  #read(name: TextFile): Buffer | undefined {
    if (!this.#contents.has(name)) this.#contents.set(name, contentOf(this.pathOf(name)));
    return this.#contents.get(name);
  }
}

function contentOf(path: string): Buffer | undefined {
  try {
    return readFileSync(path);
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (code === 'ENOENT') return undefined;
    throw unreadable(path, code ?? message);
  }
}

const unreadable = (path: string, why: string): KvError =>
  new KvError('MODEL', `${path}: cannot be read (${why}); its folder must be one of a Hugging Face model`);
