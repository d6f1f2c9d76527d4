/**
 * What workers do in a hand-off, by a script: blocks that one says it has computed are there for the one that waits for them. No bytes
 * move; the calls between coordinator and workers are the real thing.
 */
import { type Call, cacheUse, event } from './scripted-engine.ts';

/** The blocks of one prompt that lie in the cache nodes. */
export class HandedBlocks {
  #count = 0;
  readonly #looks = new Set<() => void>();

  get count(): number {
    return this.#count;
  }

  set count(count: number) {
    this.#count = count;
    this.look();
  }

  look(): void {
    for (const look of [...this.#looks]) look();
  }

  /** Resolves once `isEnough`, which is asked after each change. */
  until(isEnough: () => boolean): Promise<void> {
    return new Promise((resolve) => {
      const look = (): void => {
        if (!isEnough()) return;
        this.#looks.delete(look);
        resolve();
      };
      this.#looks.add(look);
      look();
    });
  }
}

/** The decode side: says that it has room, waits for what it lacks, then answers with `ids`. What it is told meanwhile counts. */
export const decodes =
  (blocks: HandedBlocks, ids: readonly number[], options: { local?: number; wanted?: () => number | undefined } = {}) =>
  async (call: Call): Promise<void> => {
    const { handOff, promptTokenIds } = call.request;
    const { local = 0, wanted = () => undefined } = options;
    let cancelled = false;
    call.once('cancelled', () => {
      cancelled = true;
      blocks.look();
    });
    if (handOff !== undefined) {
      call.write(event({ handOff: { localBlocks: local, readyBlocks: 0 } }));
      const needs = (): number => Math.min(wanted() ?? handOff.blocks, handOff.blocks);
      let stalled = false;
      const stall = setTimeout(() => {
        stalled = true;
        blocks.look();
      }, handOff.stallMs);
      await blocks.until(() => cancelled || stalled || Math.max(blocks.count, local) >= needs());
      clearTimeout(stall);
    }
    if (cancelled) return;
    const cachedTokens = Math.max(Math.min(blocks.count, handOff?.blocks ?? 0), local) * 16;
    for (const [at, id] of ids.entries()) {
      const cache = at === 0 ? { cache: cacheUse({ promptTokens: promptTokenIds.length, cachedTokens }) } : {};
      call.write(event({ tokenIds: [id], finishReason: at === ids.length - 1 ? 'length' : '', ...cache }));
    }
    call.end();
  };

/** The prefill side: `steps` more blocks at a time, as far as it was asked; and `token`, where it was asked for the first one. */
export const prefills =
  (blocks: HandedBlocks, step = 1, upTo = Number.POSITIVE_INFINITY, token?: number, finishReason = '') =>
  (call: Call): void => {
    const asked = call.request.prefillOnly?.blocks ?? 0;
    const last = Math.min(asked, upTo);
    if (call.request.prefillOnly?.draws && token !== undefined) call.write(event({ tokenIds: [token], finishReason }));
    if (finishReason !== '') {
      call.end();
      return;
    }
    for (let ready = Math.min(step, last); ; ready = Math.min(ready + step, last)) {
      blocks.count = Math.max(blocks.count, ready);
      call.write(event({ handOff: { localBlocks: 0, readyBlocks: ready } }));
      if (ready >= last) break;
    }
    if (last < asked) return;
    call.write(event({ finishReason: 'prefilled', handOff: { localBlocks: 0, readyBlocks: asked } }));
    call.end();
  };
