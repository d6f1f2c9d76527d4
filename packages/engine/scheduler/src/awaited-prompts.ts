/** Every hand-off of an engine that decodes: told once when its request has room, counted once when it is over, with the reason. */

import { ownEnds } from './awaited-prompt.ts';
import type { LoadEnd } from './loads.ts';
import type { EngineRequest } from './request.ts';
import type { Clock } from './types.ts';

/** Reasons come from the cache node, too: beyond this many different ones they are counted together. */
const maxReasons = 32;

export class AwaitedPrompts {
  readonly counts = { handOffs: 0, handedTokens: 0 };
  /** By reason. */
  readonly ends: Record<string, number> = {};
  readonly #clock: Clock;
  readonly #blockTokens: number;
  readonly #onRoom: (request: EngineRequest, localBlocks: number) => void;

  /** `onRoom`: the request has its room, and held so many blocks itself. */
  constructor(clock: Clock, blockTokens: number, onRoom: (request: EngineRequest, localBlocks: number) => void) {
    this.#clock = clock;
    this.#blockTokens = blockTokens;
    this.#onRoom = onRoom;
  }

  /** It has its room, and waits. */
  begin(request: EngineRequest, localBlocks: number): void {
    request.handOff!.begin(this.#clock.nowUs());
    this.counts.handOffs++;
    this.#onRoom(request, localBlocks);
  }

  /** It has its room, and goes on without waiting: of the first `most` blocks nothing is missing, or there is no tier to come through. */
  skip(request: EngineRequest, localBlocks: number, most: number): void {
    const { handOff } = request;
    if (handOff?.state !== 'open') return;
    const isLocal = localBlocks >= Math.min(handOff.blocks, most);
    this.counts.handOffs++;
    this.#onRoom(request, localBlocks);
    this.#end(request, handOff.blocks === 0 ? ownEnds.changed : isLocal ? ownEnds.local : ownEnds.noSession, 0);
  }

  /** The load that it waited for has ended; undefined: was given up. `lost`: what came is of no use. */
  loaded(request: EngineRequest, end: LoadEnd | undefined, lost: boolean): void {
    this.#end(request, reasonOf(request, end), lost ? 0 : (end?.loaded ?? 0));
  }

  /** The request is gone. */
  abandon(request: EngineRequest): void {
    if (request.handOff?.state === 'awaiting') this.#end(request, ownEnds.gone, 0);
  }

  #end({ handOff }: EngineRequest, reason: string, loadedBlocks: number): void {
    handOff!.end(this.#clock.nowUs(), loadedBlocks);
    this.counts.handedTokens += loadedBlocks * this.#blockTokens;
    const { ends } = this;
    const isKnown = Object.hasOwn(ends, reason) || Object.keys(ends).length < maxReasons;
    const name = isKnown ? reason : 'other';
    ends[name] = (ends[name] ?? 0) + 1;
  }
}

function reasonOf({ handOff }: EngineRequest, end: LoadEnd | undefined): string {
  if (handOff?.isRevoked) return ownEnds.preempted;
  if (end === undefined) return ownEnds.expired;
  return end.loaded === end.wanted ? ownEnds.complete : end.reason || ownEnds.changed;
}
