/**
 * A connector over an in-memory tier whose every answer comes when the world says so, and may be short, empty, late, a
 * lie or not come at all. It copies block content at the last moment it may (an export when it releases, an import when
 * it calls back), so that a block which was freed or reused too early leaves wrong content behind.
 */
import type { Connector, LoadResult, Match } from '@kvtier/connector';
import type { ContentExecutor } from './content-executor.ts';

export interface Faults {
  /** A match that is never answered. */
  readonly silentMatch?: () => boolean;
  /** A match that claims more than the tier holds. */
  readonly lyingMatch?: () => boolean;
  /** How many of the blocks of a load to bring; default all that are there. */
  readonly shorten?: (blocks: number) => number;
  /** A load that calls back only after everything else, long after the engine's own deadline. */
  readonly lateLoad?: () => boolean;
  /** A store that does not happen. */
  readonly refuseStore?: () => boolean;
}

export interface FaultyConnectorOptions {
  readonly executor: ContentExecutor;
  readonly hashBytes: number;
  readonly later: (call: () => void) => void;
  readonly wake: () => void;
  readonly faults?: Faults;
}

export class FaultyConnector implements Connector {
  attached = true;
  /** Content by hash. */
  readonly tier = new Map<string, Uint32Array>();
  /** Loads that hold their callback back until `callBack`. */
  readonly late: (() => void)[] = [];
  readonly forgotten: string[] = [];
  readonly prefills: number[] = [];
  readonly #options: FaultyConnectorOptions;
  readonly #matches = new Map<string, { known: number | undefined }>();

  constructor(options: FaultyConnectorOptions) {
    this.#options = options;
  }

  match(requestId: string, hashes: Buffer, localBlocks: number): Match {
    const { later, wake, faults } = this.#options;
    let match = this.#matches.get(requestId);
    if (!match) {
      const asked: { known: number | undefined } = { known: undefined };
      match = asked;
      this.#matches.set(requestId, asked);
      if (!faults?.silentMatch?.()) {
        later(() => {
          let held = 0;
          while (this.tier.has(this.#hashAt(hashes, held))) held++;
          asked.known = faults?.lyingMatch?.() ? held + 5 : held;
          wake();
        });
      }
    }
    if (match.known === undefined) return { state: 'pending' };
    return { state: 'known', blocks: Math.max(match.known - localBlocks, 0) };
  }

  load(
    requestId: string,
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onDone: (result: LoadResult) => void,
  ): void {
    const { executor, later, faults } = this.#options;
    this.#matches.delete(requestId);
    const wanted = Math.min(blockIds.length, faults?.shorten?.(blockIds.length) ?? blockIds.length);
    const arrive = (): void => {
      let loaded = 0;
      blockIds.forEach((block, i) => {
        const content = this.tier.get(this.#hashAt(hashes, firstBlock + i));
        // What does not arrive may have been overwritten in part.
        if (i < wanted && i === loaded && content) {
          executor.block(block).set(content);
          loaded++;
        } else executor.block(block).fill(0xf00d);
      });
      onDone({ loaded, byTier: loaded > 0 ? { arena: loaded } : {}, elapsedUs: 5 });
    };
    if (faults?.lateLoad?.()) this.late.push(arrive);
    else later(arrive);
  }

  store(hashes: Buffer, firstBlock: number, blockIds: Int32Array, onReleased: () => void): void {
    this.#options.later(() => {
      if (!this.#options.faults?.refuseStore?.()) {
        blockIds.forEach((block, i) => {
          this.tier.set(this.#hashAt(hashes, firstBlock + i), this.#options.executor.block(block).slice());
        });
      }
      onReleased();
    });
  }

  forget(requestId: string): void {
    this.#matches.delete(requestId);
    this.forgotten.push(requestId);
  }

  observePrefill(tokens: number): void {
    this.prefills.push(tokens);
  }

  async close(): Promise<void> {}

  #hashAt(hashes: Buffer, block: number): string {
    const { hashBytes } = this.#options;
    return hashes.toString('latin1', block * hashBytes, (block + 1) * hashBytes);
  }
}
