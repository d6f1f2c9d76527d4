/** The folders of tokenizers that the configuration names: what is not there now is a slip of the pen, and is told at the start. */
import { accessSync, constants } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';

/** @param folders by model name. @throws KvError CONFIG: one has no tokenizer.json that can be read */
export function checkTokenizers(folders: Readonly<Record<string, string>>): void {
  for (const [model, folder] of Object.entries(folders)) {
    const path = join(folder, 'tokenizer.json');
    try {
      accessSync(path, constants.R_OK);
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      throw new KvError(
        'CONFIG',
        `tokenizers.${model}: ${path} cannot be read (${code}); name a folder with that model's tokenizer.json`,
      );
    }
  }
}
