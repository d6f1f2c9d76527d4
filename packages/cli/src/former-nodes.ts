/**
 * What nodes of a former start have stored that are none any more: their bytes go, since nobody would count them. Of a folder of this
 * name only what a cache node has made is touched: others may have put theirs beside it.
 */
import { existsSync, readdirSync, rmdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';

const nodeFolder = /^node-[1-9]\d?$/;
/** A cache node has held it for as long as it ran. */
const mark = 'node.lock';
/** The mark last: what is not whole gone is seen again at the next start. */
const made = ['segments', 'place.id', mark];

/** Folders of cache nodes below `dataDir` from number `nodes` on. */
export const formerNodes = (dataDir: string, nodes: number): string[] =>
  readdirSync(dataDir)
    .filter((name) => nodeFolder.test(name) && Number(name.slice(5)) >= nodes)
    .map((name) => join(dataDir, name))
    .filter((dir) => existsSync(join(dir, mark)));

/** Removes what a node has made there, and the folder where nothing else lies in it. Call with the data folder locked. */
export function removeFormerNode(dir: string): void {
  for (const name of made) rmSync(join(dir, name), { recursive: true, force: true });
  if (readdirSync(dir).length === 0) rmdirSync(dir);
}
