/**
 * One prefill and one decode worker in virtual time under a load that arrives whatever becomes of it: how many requests a second get
 * all of their tokens with the first one in time, and how long anybody waits. Real: the dispatcher, the decision, the hand-offs.
 */
import { Tries } from '@kvtier/api-server/testing';
import { Dispatcher } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { HandOffs } from '@kvtier/handoff';
import { maxMedia } from '@kvtier/kv-index';
import { createLogger } from '@kvtier/telemetry';
import { installTime } from './platform.ts';
import { blockTokens, VirtualWorker, VirtualWorkers } from './virtual-workers.ts';
import { World } from './world.ts';

export interface LoadShape {
  readonly promptTokens: number;
  readonly answerTokens: number;
  /** To the first token, named by each request; undefined: whenever it comes. */
  readonly ttftMs: number | undefined;
}

export interface Served {
  /** Requests a second that were whole, and whose first token came within `inTimeMs`. */
  readonly goodPerS: number;
  readonly refused: number;
  /** To the first token of those that were served; to the end of all. */
  readonly longestFirstMs: number;
  readonly longestMs: number;
  readonly all: number;
}

/** Nobody waits longer for a worker. */
export const maxWaitMs = 10_000;
const silent = createLogger('simulation', 'silent');
const tokensPerS = 4_000;

/** `perS` requests a second, for `seconds`; then until all have ended. @throws Error: somebody never ends */
export async function serve(
  seed: number,
  { promptTokens, answerTokens, ttftMs }: LoadShape,
  perS: number,
  seconds: number,
  inTimeMs: number,
): Promise<Served> {
  const world = new World(seed);
  const uninstall = installTime(world);
  try {
    const all = (['prefill', 'decode'] as const).map((role, at) => new VirtualWorker(at, role, 20_000, tokensPerS, 1));
    const workers = new VirtualWorkers(world, all);
    const held = { blocks: 0, byMedium: new Int32Array(maxMedia) };
    const holdings = { match: (_: string, _keys: Int32Array, numbers: readonly number[]) => numbers.map(() => held) };
    const dispatch = new Dispatcher({ workers, holdings, maxWaitMs, random: () => world.random() });
    const handOffs = new HandOffs({
      engines: workers,
      holdings,
      logger: silent,
      limits: { itlMs: 50, ttftMs: inTimeMs },
    });
    let [good, refused, open, count, longestFirstMs, longestMs] = [0, 0, 0, 0, 0, 0];
    const ask = async (): Promise<void> => {
      const id = `r${count++}`;
      const beganMs = world.nowMs;
      const keys = new Int32Array(2 * Math.floor(promptTokens / blockTokens)).fill(count);
      const routed = {
        ...{ id, model: 'demo', among: undefined, tokens: promptTokens, blockTokens, maxTokens: answerTokens, keys },
        ...{ session: '', firstTokenByMs: ttftMs === undefined ? undefined : beganMs + ttftMs },
      };
      const request = {
        ...{ requestId: id, promptTokenIds: new Array<number>(promptTokens).fill(count), maxTokens: answerTokens },
        ...{ temperature: 0, topK: 0, topP: 1, seed: undefined, ignoreEos: false, stopTokenIds: [], cacheSalt: '' },
        loraName: '',
      };
      const { signal } = new AbortController();
      const tries = new Tries(dispatch, workers, { maxTries: 3, withinMs: 10_000 });
      let tokens = 0;
      let firstMs = Number.POSITIVE_INFINITY;
      try {
        const choice = await tries.next(routed, signal);
        try {
          const asked = { ...routed, arrivedMs: beganMs, ttftMs, itlMs: undefined, hasBegun: false };
          const onEvent = ({ tokenIds }: { readonly tokenIds: readonly number[] }): undefined => {
            if (tokens === 0) {
              choice.firstToken();
              firstMs = world.nowMs - beganMs;
            }
            tokens += tokenIds.length;
          };
          await handOffs.follow(choice, asked, request, signal, onEvent, () => {});
        } finally {
          choice.ended();
        }
        if (tokens === answerTokens && firstMs <= inTimeMs) good++;
        longestFirstMs = Math.max(longestFirstMs, firstMs);
      } catch (error) {
        if (!(error instanceof KvError) || error.code !== 'BUSY') throw error;
        refused++;
      }
      longestMs = Math.max(longestMs, world.nowMs - beganMs);
    };
    let failure: unknown;
    const arrive = (): void => {
      if (world.nowMs >= seconds * 1_000) return;
      open++;
      ask()
        .catch((error: unknown) => {
          failure = error;
        })
        .finally(() => open--);
      world.schedule(Math.ceil((-Math.log(1 - world.random()) / perS) * 1e6), 'arrives', arrive);
    };
    arrive();
    while ((open > 0 || world.nowMs < seconds * 1_000) && failure === undefined && (await world.step()));
    if (failure !== undefined) throw failure;
    if (open > 0) throw new Error(`${open} of ${count} requests never end`);
    dispatch.close();
    return { goodPerS: good / seconds, refused, longestFirstMs, longestMs, all: count };
  } finally {
    uninstall();
  }
}
