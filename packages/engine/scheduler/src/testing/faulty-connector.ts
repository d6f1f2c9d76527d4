/**
 * A connector over an in-memory tier whose every answer comes when the world says so, and may be short, empty, late, a
 * lie or not come at all. It copies block content at the last moment it may (an export when it releases, an import when
 * it calls back), so that a block which was freed or reused too early leaves wrong content behind.
 */

import type { StepResult } from '@kvtier/executor';
import type { ArrivedLoad, AwaitedLoad, Connector, LoadResult, Match, StoreOptions } from '../connector.ts';
import type { Clock } from '../types.ts';
import type { ContentExecutor } from './content-executor.ts';

export interface Faults {
  /** A match that is never answered. */
  readonly silentMatch?: () => boolean;
  /** What is known of a waiting request is asked for anew, whenever that may be. */
  readonly renews?: () => boolean;
  /** A match that claims more than the tier holds. */
  readonly lyingMatch?: () => boolean;
  /** How many of the blocks of a hit to compute while the others come, where that may be; default none. */
  readonly head?: (blocks: number) => number;
  /** How many of the blocks of a load to bring; default all that are there. */
  readonly shorten?: (blocks: number) => number;
  /** A load that calls back only after everything else, long after the engine's own deadline. */
  readonly lateLoad?: () => boolean;
  /** A block that is lost on its way in, or out of the tier again, by itself. */
  readonly lostBlock?: () => boolean;
  /** A load that does not all lie in the arena at once, and so is not offered to a step. */
  readonly scattered?: () => boolean;
  /** A load that ended before the step that was to import it is put together. */
  readonly deadOffer?: () => boolean;
  /** A step's import that does not take place at all. */
  readonly refuseImport?: () => boolean;
  /** A store of blocks that somebody else is writing. */
  readonly busyStore?: () => boolean;
  /** A store that does not happen. */
  readonly refuseStore?: () => boolean;
  /** A store of which nothing is heard, though it may have happened. */
  readonly lostStore?: () => boolean;
}

export interface FaultyConnectorOptions {
  readonly executor: ContentExecutor;
  readonly hashBytes: number;
  readonly later: (call: () => void) => void;
  readonly wake: () => void;
  readonly clock: Clock;
  readonly faults?: Faults;
  /** One that several engines share. */
  readonly tier?: SharedTier;
}

/** What a tier holds, and who waits for more. */
export interface SharedTier {
  readonly blocks: Map<string, Uint32Array>;
  readonly listeners: Set<() => void>;
}

/** A load that waits for blocks. */
interface Awaiting {
  limit: number;
  check(): void;
}

type Step = () => Promise<StepResult>;

export class FaultyConnector implements Connector {
  attached = true;
  /** Of the tier's boot. */
  epoch = 1n;
  storingBlocks = 0;
  storeRoom = Number.POSITIVE_INFINITY;
  /** Content by hash, behind "group:" in groups other than the first. */
  readonly tier: Map<string, Uint32Array>;
  /** By request. */
  readonly awaiting = new Map<string, Awaiting>();
  /** Reasons of awaited loads, as they ended. */
  readonly awaitedEnds: string[] = [];
  /** Loads that hold their callback back until `callBack`. */
  readonly late: (() => void)[] = [];
  readonly forgotten: string[] = [];
  /** Blocks before the first that each hint named. */
  readonly prefetched: number[] = [];
  readonly prefills: number[] = [];
  /** Blocks that a load named although no token after it looks at them. */
  outsideBlocks = 0;
  readonly #options: FaultyConnectorOptions;
  readonly #shared: SharedTier;
  readonly #matches = new Map<string, { known: number | undefined }>();

  constructor(options: FaultyConnectorOptions) {
    this.#options = options;
    this.#shared = options.tier ?? { blocks: new Map(), listeners: new Set() };
    this.tier = this.#shared.blocks;
    this.#shared.listeners.add(() => {
      for (const { check } of [...this.awaiting.values()]) check();
    });
  }

  /** The tier holds more. */
  told(): void {
    for (const listener of this.#shared.listeners) listener();
  }

  endLoad(requestId: string, blocks: number): void {
    const awaiting = this.awaiting.get(requestId);
    if (!awaiting) return;
    awaiting.limit = blocks;
    awaiting.check();
  }

  match(requestId: string, hashes: Buffer, localBlocks: number, isIdle = false): Match {
    const { later, wake, faults } = this.#options;
    let match = this.#matches.get(requestId);
    if (!match) {
      const asked: { known: number | undefined } = { known: undefined };
      match = asked;
      this.#matches.set(requestId, asked);
      if (!faults?.silentMatch?.()) {
        later(() => {
          const held = this.#longestHeld(hashes, localBlocks);
          asked.known = faults?.lyingMatch?.() ? held + 5 : held;
          wake();
        });
      }
    }
    if (match.known === undefined) return { state: 'pending' };
    const blocks = Math.max(match.known - localBlocks, 0);
    const head = isIdle && blocks > 0 ? (faults?.head?.(blocks) ?? 0) : 0;
    return { state: 'known', blocks: blocks - head, head };
  }

  renew(requestId: string, hashes: Buffer): void {
    const match = this.#matches.get(requestId);
    if (match?.known === undefined || !this.#options.faults?.renews?.()) return;
    this.#options.later(() => {
      match.known = this.#longestHeld(hashes, 0);
      this.#options.wake();
    });
  }

  load(
    requestId: string,
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onDone: (result: LoadResult) => void,
    onArrived?: (load: ArrivedLoad) => boolean,
    awaited?: AwaitedLoad,
  ): void {
    const { executor, later, faults } = this.#options;
    this.#matches.delete(requestId);
    const columns = blockIds.length / this.#windows.length;
    this.#countOutside(blockIds, firstBlock, firstBlock + columns);
    const wanted = Math.min(columns, faults?.shorten?.(columns) ?? columns);
    const bring = (): number => {
      let loaded = columns;
      blockIds.forEach((block, at) => {
        if (block === 0) return;
        const [group, i] = [Math.floor(at / columns), at % columns];
        const name = this.#nameOf(group, hashes, firstBlock + i);
        if (faults?.lostBlock?.()) this.tier.delete(name);
        const content = this.tier.get(name);
        // What does not arrive may have been overwritten in part.
        if (i < wanted && content) {
          executor.block(block).set(content);
          return;
        }
        executor.block(block).fill(0xf00d);
        loaded = Math.min(loaded, i);
      });
      return loaded;
    };
    const end = (loaded: number): void => onDone({ loaded, byTier: loaded > 0 ? { arena: loaded } : {}, elapsedUs: 5 });
    const arrive = (): void => end(bring());
    if (awaited) {
      const wantedNames = blockIds.reduce<string[][]>(
        (names, block, at) => {
          if (block !== 0)
            names[at % columns]!.push(this.#nameOf(Math.floor(at / columns), hashes, firstBlock + (at % columns)));
          return names;
        },
        Array.from({ length: columns }, () => []),
      );
      const heldNow = (): number => {
        const missing = wantedNames.findIndex((names) => !names.every((name) => this.tier.has(name)));
        return missing < 0 ? columns : missing;
      };
      this.#await(requestId, columns, awaited, heldNow, (reason) => {
        const loaded = bring();
        onDone({ loaded, byTier: loaded > 0 ? { arena: loaded } : {}, elapsedUs: 5, reason });
      });
      return;
    }
    const offer = (): void => {
      const live = !faults?.deadOffer?.();
      const checksums = new BigUint64Array(columns);
      const blocks = { arena: 1, blockIds, offsets: new Float64Array(columns), checksums };
      const load = {
        blocks,
        live,
        import: (step: Step) => this.#importWith(step, bring, end),
        decline: () => later(arrive),
      };
      if (!onArrived?.(load)) later(arrive);
    };
    if (faults?.lateLoad?.()) this.late.push(arrive);
    else later(onArrived && !faults?.scattered?.() ? offer : arrive);
  }

  #await(
    requestId: string,
    columns: number,
    { stallMs, deadlineMs, onCame }: AwaitedLoad,
    heldNow: () => number,
    end: (reason: string) => void,
  ): void {
    const { clock, later, faults } = this.#options;
    let seen = 0;
    let told = 0;
    let cancelStall = (): void => {};
    const finish = (reason: string): void => {
      if (this.awaiting.get(requestId) !== awaiting) return;
      this.awaiting.delete(requestId);
      this.awaitedEnds.push(reason);
      cancelStall();
      cancelDeadline();
      if (faults?.lateLoad?.()) this.late.push(() => end(reason));
      else later(() => end(reason));
    };
    const restart = (): void => {
      cancelStall();
      cancelStall = clock.after(stallMs, () => finish('awaited'));
    };
    const awaiting: Awaiting = {
      limit: columns,
      check: () => {
        const held = heldNow();
        if (held >= Math.min(awaiting.limit, columns)) finish(held >= columns ? '' : 'changed');
        else if (held > seen) {
          restart();
          later(() => {
            if (this.awaiting.get(requestId) !== awaiting || seen <= told) return;
            told = seen;
            onCame?.(seen);
          });
        }
        seen = held;
      },
    };
    const cancelDeadline = clock.after(deadlineMs, () => finish('deadline'));
    this.awaiting.set(requestId, awaiting);
    restart();
    later(awaiting.check);
  }

  /** Blocks in front of the first bad one are good, those behind it look good too. */
  async #importWith(step: Step, bring: () => number, end: (loaded: number) => void): Promise<StepResult> {
    let loaded = 0;
    this.#options.executor.bring = ({ blockIds }) => {
      if (this.#options.faults?.refuseImport?.()) return null;
      loaded = bring();
      return Uint8Array.from(blockIds, (_, i) => (i === loaded ? 0 : 1));
    };
    try {
      return await step();
    } catch (error) {
      loaded = 0;
      throw error;
    } finally {
      end(loaded);
    }
  }

  store(
    hashes: Buffer,
    firstBlock: number,
    blockIds: Int32Array,
    onReleased: () => void,
    { onSettled }: StoreOptions = {},
  ): void {
    const columns = blockIds.length / this.#windows.length;
    const { later, faults } = this.#options;
    later(() => {
      const isBusy = faults?.busyStore?.() ?? false;
      const isTaken = !isBusy && !faults?.refuseStore?.();
      const isLost = faults?.lostStore?.() ?? false;
      if (isTaken) {
        blockIds.forEach((block, at) => {
          if (block === 0) return;
          const name = this.#nameOf(Math.floor(at / columns), hashes, firstBlock + (at % columns));
          this.tier.set(name, this.#options.executor.block(block).slice());
        });
      }
      onReleased();
      this.told();
      if (!onSettled) return;
      if (isLost) later(() => onSettled(0, true, true));
      else later(() => onSettled(isTaken ? columns : 0, isBusy));
    });
  }

  prefetch(_requestId: string, _hashes: Buffer, firstBlock: number): void {
    this.prefetched.push(firstBlock);
  }

  forget(requestId: string): void {
    this.#matches.delete(requestId);
    this.forgotten.push(requestId);
  }

  observePrefill(tokens: number): void {
    this.prefills.push(tokens);
  }

  async close(): Promise<void> {}

  /** Windows in tokens, 0 = all. */
  get #windows(): readonly number[] {
    return this.#options.executor.kv.groups?.map(({ windowTokens }) => windowTokens) ?? [0];
  }

  /** Blocks of the longest prefix that every group has what is looked at of, beyond what the engine holds. */
  #longestHeld(hashes: Buffer, localBlocks: number): number {
    const has = (group: number, block: number): boolean => this.tier.has(this.#nameOf(group, hashes, block));
    for (let end = hashes.length / this.#options.hashBytes; end > localBlocks; end--) {
      const whole = this.#windows.every((window, group) => {
        for (let block = Math.max(localBlocks, this.#firstSeen(window, end)); block < end; block++)
          if (!has(group, block)) return false;
        return true;
      });
      if (whole) return end;
    }
    return localBlocks;
  }

  /** The first block that the token after `end` blocks looks at. */
  #firstSeen(window: number, end: number): number {
    const { blockTokens } = this.#options.executor.kv;
    return window === 0 ? 0 : Math.max(0, Math.floor((end * blockTokens - window + 1) / blockTokens));
  }

  #countOutside(blockIds: Int32Array, firstBlock: number, end: number): void {
    const columns = blockIds.length / this.#windows.length;
    blockIds.forEach((block, at) => {
      const window = this.#windows[Math.floor(at / columns)]!;
      if (block !== 0 && firstBlock + (at % columns) < this.#firstSeen(window, end)) this.outsideBlocks++;
    });
  }

  #nameOf(group: number, hashes: Buffer, block: number): string {
    const hash = this.#hashAt(hashes, block);
    return group === 0 ? hash : `${group}:${hash}`;
  }

  #hashAt(hashes: Buffer, block: number): string {
    const { hashBytes } = this.#options;
    return hashes.toString('latin1', block * hashBytes, (block + 1) * hashBytes);
  }
}
