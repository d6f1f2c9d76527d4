/**
 * What nodes of a former start have stored that are none any more: their bytes go, since nobody would count them. Of a folder of this
 * name only what a cache node has made is touched: others may have put theirs beside it.
 *
 * Invariants: nothing is removed but under the lock of the node that made it, since such a folder may be the data folder of another
 * system's node by now; what cannot be removed is told, and ends no start.
 */
import { existsSync, readdirSync, rmdirSync, rmSync } from 'node:fs';
import { join } from 'node:path';
import { native } from '@kvtier/data-plane';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';

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

/** Those that are nobody's: claimed before a start counts their bytes, removed after it. */
export class FormerNodes {
  readonly #onEvent: (message: string) => void;
  readonly #locks = new Map<string, number>();

  /** Call with the data folder locked. */
  constructor(dataDir: string, nodes: number, onEvent: (message: string) => void) {
    this.#onEvent = onEvent;
    for (const dir of formerNodes(dataDir, nodes)) {
      const failure = failureOf(() => this.#locks.set(dir, native.lockFile(join(dir, mark))));
      if (failure !== undefined) onEvent(`${dir}: no node of this start, and what lies there stays: ${failure}`);
    }
  }

  /** Whose bytes will be free. */
  get dirs(): readonly string[] {
    return [...this.#locks.keys()];
  }

  /** Their arena files lie in `arenaDir`. */
  remove(arenaDir: string): void {
    for (const dir of this.dirs) {
      const failure = failureOf(() => {
        removeStaleArenas(dir, arenaDir);
        removeFormerNode(dir);
      });
      const isGone = 'removed what it had stored';
      const how = failure === undefined ? isGone : `what it stored cannot be removed (${failure}); remove it yourself`;
      this.#onEvent(`${dir}: there is no such node any more; ${how}`);
    }
    this.release();
  }

  /** They stay as they are. */
  release(): void {
    for (const lock of this.#locks.values()) native.unlock(lock);
    this.#locks.clear();
  }
}

/** Removes what a node has made there, and the folder where nothing else lies in it. */
function removeFormerNode(dir: string): void {
  for (const name of made) rmSync(join(dir, name), { recursive: true, force: true });
  try {
    rmdirSync(dir);
  } catch {
    // Others have theirs there, or it is a link or a mount point: it is as they made it.
  }
}

function failureOf(attempt: () => unknown): string | undefined {
  try {
    attempt();
    return undefined;
  } catch (error) {
    return KvError.from(error).message;
  }
}
