/** From here on TypeScript can be imported: tsx is installed and is loaded into this process, which saves starting another. */
import { pathToFileURL } from 'node:url';
import { root } from './command.mjs';

export async function importTypeScript(path) {
  const { register } = await import('tsx/esm/api');
  register();
  return import(pathToFileURL(`${root}/${path}`).href);
}
