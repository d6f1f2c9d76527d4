/**
 * Those who follow a tier's changes (`Tier.follow`, `Tier.followInPages`). Invariant: a follower sees what was held when it came,
 * then every change once, in order; one that takes it in pages sees each change, and in each page what is held at that moment. One
 * that throws is a defect and the throw is the tier's caller's.
 */
import type { HashKey, Namespace } from '@kvtier/identity';
import { type Slices, slicing } from './slices.ts';
import type { Following, Tier, TierChange } from './tier.ts';

type Listener = (change: TierChange) => void;
/** Blocks of one namespace, with the end of each object where it is known. */
export type Page = readonly [Namespace, readonly HashKey[], (readonly number[] | undefined)?];
/** undefined: nothing found yet, and it took some time. */
export type Pages = Iterator<Page | undefined, void>;

export class Followers {
  readonly #listeners = new Set<Listener>();
  /** Those that have not been told all yet. */
  readonly #paging = new Set<Listener>();

  /** `held`: all that the tier lists now. */
  follow(listener: Listener, held: Iterable<Page>): () => void {
    for (const [namespace, hashes, expiresS] of held) listener({ kind: 'stored', namespace, hashes, expiresS });
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  /** `pages`: of the live index (`pagesOfMap`, `pagesOfRows`), so that what is held all the while comes in one of them. */
  followInPages(listener: Listener, pages: Pages): Following {
    this.#listeners.add(listener);
    this.#paging.add(listener);
    return {
      next: () => {
        for (let told = 0; told < slicing.blocks && this.#paging.has(listener); ) {
          const page = pages.next();
          if (page.done === true) this.#paging.delete(listener);
          else if (page.value === undefined) return true;
          else {
            const [namespace, hashes, expiresS] = page.value;
            listener({ kind: 'stored', namespace, hashes, expiresS });
            told += hashes.length;
          }
        }
        return this.#paging.has(listener);
      },
      end: () => {
        this.#listeners.delete(listener);
        this.#paging.delete(listener);
      },
    };
  }

  /** Nobody follows: a tier may skip the work of telling. */
  get none(): boolean {
    return this.#listeners.size === 0;
  }

  stored(namespace: Namespace, hashes: readonly HashKey[], expiresS?: readonly number[]): void {
    this.#tell({ kind: 'stored', namespace, hashes, expiresS });
  }

  removed(namespace: Namespace, hashes: readonly HashKey[]): void {
    this.#tell({ kind: 'removed', namespace, hashes });
  }

  cleared(): void {
    this.#tell({ kind: 'cleared', namespace: null, hashes: [] });
  }

  /** It is listed in another place of the index now: whose pages have been there already is told of it once more. */
  moved(namespace: Namespace, hash: () => HashKey, expiresS: number): void {
    if (this.#paging.size === 0) return;
    const change: TierChange = { kind: 'stored', namespace, hashes: [hash()], expiresS: [expiresS] };
    for (const listener of this.#paging) listener(change);
  }

  #tell(change: TierChange): void {
    if (change.kind !== 'cleared' && change.hashes.length === 0) return;
    for (const listener of this.#listeners) listener(change);
  }
}

/** A map's iterator goes on over what comes and goes meanwhile, and what comes goes to its end: just what is needed. */
export function* pagesOfMap<Space, Block>(
  spaces: ReadonlyMap<string, Space>,
  blocksOf: (space: Space) => ReadonlyMap<HashKey, Block>,
  namespaceOf: (space: Space) => Namespace,
  endOf?: (block: Block) => number,
): Generator<Page, void> {
  for (const [key, space] of spaces) {
    const namespace = namespaceOf(space);
    let page: HashKey[] = [];
    let ends: number[] | undefined = endOf && [];
    for (const [hash, block] of blocksOf(space)) {
      page.push(hash);
      if (endOf) ends!.push(endOf(block));
      if (page.length < slicing.blocks) continue;
      yield [namespace, page, ends];
      page = [];
      ends = endOf && [];
      // Dropped as a whole meanwhile.
      if (spaces.get(key) !== space) break;
    }
    if (page.length > 0) yield [namespace, page, ends];
  }
}

/** An index in numbered rows that stay where they are. */
export interface Rows {
  /** Rows that were ever used. */
  readonly rowCount: number;
  /** undefined: nothing is listed there. */
  namespaceOfRow(row: number): Namespace | undefined;
  hashOfRow(row: number): HashKey;
  /** Where the tier knows it. */
  endOfRow?(row: number): number;
}

export function* pagesOfRows(rows: Rows): Generator<Page | undefined, void> {
  let row = 0;
  while (row < rows.rowCount) {
    const page: HashKey[] = [];
    const ends: number[] | undefined = rows.endOfRow && [];
    const end = row + 16 * slicing.blocks;
    let namespace: Namespace | undefined;
    for (; row < rows.rowCount && row < end && page.length < slicing.blocks; row++) {
      const each = rows.namespaceOfRow(row);
      if (each === undefined) continue;
      if (namespace !== undefined && each !== namespace) break;
      namespace = each;
      page.push(rows.hashOfRow(row));
      ends?.push(rows.endOfRow!(row));
    }
    yield namespace === undefined ? undefined : [namespace, page, ends];
  }
}

/** Follow in pages, also a tier that lists all at once: that is kept here then, and told page by page. */
export function followInPages(
  tier: Pick<Tier, 'follow' | 'followInPages'>,
  listener: Listener,
  onMore?: () => void,
): Following {
  if (tier.followInPages !== undefined) return tier.followInPages(listener, onMore);
  const left = new Map<string, { readonly namespace: Namespace; readonly blocks: Map<HashKey, number | undefined> }>();
  const followers = new Followers();
  let isListing = true;
  const end = tier.follow((change) => {
    if (change.kind === 'cleared') left.clear();
    else {
      const { namespace, hashes } = change;
      const ends = change.kind === 'stored' ? change.expiresS : undefined;
      const space = left.get(namespace.key) ?? { namespace, blocks: new Map<HashKey, number | undefined>() };
      if (isListing) for (const [at, hash] of hashes.entries()) space.blocks.set(hash, ends?.[at]);
      else for (const hash of hashes) space.blocks.delete(hash);
      if (isListing) left.set(namespace.key, space);
    }
    if (!isListing) listener(change);
  });
  isListing = false;
  const pages = pagesOfMap(
    left,
    ({ blocks }) => blocks,
    ({ namespace }) => namespace,
    (end) => end ?? 0,
  );
  const following = followers.followInPages(listener, pages);
  return {
    next: () => following.next(),
    end: () => {
      end();
      following.end();
    },
  };
}

/** Follow: the first page is told now, the others in turns of their own. Returns the end of it. */
export function followInSlices(
  tier: Pick<Tier, 'follow' | 'followInPages'>,
  listener: Listener,
  slices: Slices,
): () => void {
  const following = followInPages(tier, listener);
  const next = (): boolean => following.next();
  if (next()) slices.add(next);
  return () => {
    slices.remove(next);
    following.end();
  };
}
