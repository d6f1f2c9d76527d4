/** The folders of tokenizers that the configuration names: what is not there at the start may be a slip of the pen, and is told. */
import { accessSync, constants } from 'node:fs';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';

/**
 * @param folders by model name
 * @param warn of one that has no tokenizer.json which can be read: it may be there later, and the other models are served meanwhile
 * @throws KvError CONFIG: none has
 */
export function checkTokenizers(folders: Readonly<Record<string, string>>, warn: (line: string) => void): void {
  const problems: string[] = [];
  for (const [model, folder] of Object.entries(folders)) {
    const path = join(folder, 'tokenizer.json');
    try {
      accessSync(path, constants.R_OK);
    } catch (error) {
      const { code } = error as NodeJS.ErrnoException;
      const remedy = "name a folder with that model's tokenizer.json";
      problems.push(`tokenizers.${model}: ${path} cannot be read (${code}); ${remedy}`);
    }
  }
  if (problems.length > 0 && problems.length === Object.keys(folders).length) throw new KvError('CONFIG', problems[0]!);
  for (const problem of problems) warn(problem);
}
