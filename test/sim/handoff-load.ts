/**
 * A coordinator and its workers in virtual time under a load that arrives whatever becomes of it: when each request gets its tokens.
 * Real: the dispatcher, the decision, the hand-offs.
 *
 * Laws: everybody ends, and nothing is counted then; where all requests are alike, no worker stands idle while somebody waits in front.
 */
import { Expected, Tries } from '@kvtier/api-server/testing';
import { Dispatcher } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { type HandOffLimits, HandOffs } from '@kvtier/handoff';
import { maxMedia } from '@kvtier/kv-index';
import { createLogger } from '@kvtier/telemetry';
import { seededRandom } from '@kvtier/tiers/testing';
import { installTime } from './platform.ts';
import { blockTokens, VirtualWorker, VirtualWorkers } from './virtual-workers.ts';
import { World } from './world.ts';

export interface LoadShape {
  readonly promptTokens: number;
  readonly answerTokens: number;
  /** To the first token, named by each request; undefined: whenever it comes. */
  readonly ttftMs: number | undefined;
}

/** Requests of one shape, so many a second. */
export interface Arriving extends LoadShape {
  readonly perS: number;
}

/** A request, as its client saw it. */
export interface Asked {
  readonly shape: LoadShape;
  readonly isRefused: boolean;
  /** To the first token; between two; to the end. */
  readonly firstMs: number;
  readonly gapsMs: readonly number[];
  readonly wholeMs: number;
  /** All of its tokens. */
  readonly isWhole: boolean;
  /** What was decided. */
  readonly line: string;
}

export interface Served {
  /** Requests a second that were whole, and whose first token came within `inTimeMs`. */
  readonly goodPerS: number;
  readonly refused: number;
  /** Of those that were let in, the share whose first token came in time; and the longest that one was kept waiting to be refused. */
  readonly kept: number;
  readonly longestRefusedMs: number;
  /** To the first token of those that were served; to the end of all. */
  readonly longestFirstMs: number;
  readonly longestMs: number;
  readonly all: number;
}

/** Nobody waits longer for a worker. */
export const maxWaitMs = 10_000;
/** From a request's end at a worker until the next one is on its way there: messages, and a look at the queue. */
const idleMs = 10;
/** One computes prompts, and the other one decodes. */
const apart = ['prefill', 'decode'] as const;
const silent = createLogger('simulation', 'silent');
const tokensPerS = 4_000;

/** One prefill and one decode worker, or others, `perS` requests a second for `seconds`. */
export async function serve(
  seed: number,
  shape: LoadShape,
  perS: number,
  seconds: number,
  inTimeMs: number,
  roles: readonly ('prefill' | 'decode' | 'both')[] = apart,
): Promise<Served> {
  const workers = roles.map((role, at) => new VirtualWorker(at, role, 20_000, tokensPerS, 1));
  const split = roles === apart ? 'predicted' : 'never';
  const all = await play(seed, workers, { itlMs: 50, ttftMs: inTimeMs, split }, [{ ...shape, perS }], seconds);
  const served = all.filter(({ isRefused }) => !isRefused);
  const refused = all.filter(({ isRefused }) => isRefused);
  const good = served.filter(({ isWhole, firstMs }) => isWhole && firstMs <= inTimeMs).length;
  return {
    goodPerS: good / seconds,
    refused: refused.length,
    kept: good / served.length,
    longestRefusedMs: Math.max(0, ...refused.map(({ wholeMs }) => wholeMs)),
    longestFirstMs: Math.max(0, ...served.map(({ firstMs }) => firstMs)),
    longestMs: Math.max(0, ...all.map(({ wholeMs }) => wholeMs)),
    all: all.length,
  };
}

/** All that arrive within `seconds`, until the last one has ended. @throws Error: a law is broken */
export async function play(
  seed: number,
  all: VirtualWorker[],
  limits: Partial<HandOffLimits>,
  arriving: readonly Arriving[],
  seconds: number,
): Promise<Asked[]> {
  const world = new World(seed);
  const uninstall = installTime(world);
  try {
    const workers = new VirtualWorkers(world, all);
    const held = { blocks: 0, byMedium: new Int32Array(maxMedia) };
    const holdings = { match: (_: string, _keys: Int32Array, numbers: readonly number[]) => numbers.map(() => held) };
    const dispatch = new Dispatcher({ workers, holdings, maxWaitMs, random: () => world.random() });
    const handOffs = new HandOffs({ engines: workers, holdings, logger: silent, limits });
    const ended: Asked[] = [];
    let [open, count] = [0, 0];
    const ask = async (shape: LoadShape): Promise<void> => {
      const { promptTokens, answerTokens, ttftMs } = shape;
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
      const tries = new Tries({
        ...{ dispatch, engines: workers, tries: { maxTries: 3, withinMs: 10_000 } },
        expected: new Expected({ engines: workers, awayMs: 0 }),
      });
      let [tokens, firstMs, lastMs, isRefused, line] = [0, 0, 0, false, ''];
      const gapsMs: number[] = [];
      try {
        const choice = await tries.next(routed, signal);
        try {
          const asked = { ...routed, arrivedMs: beganMs, ttftMs, itlMs: undefined, hasBegun: false };
          const onEvent = ({ tokenIds }: { readonly tokenIds: readonly number[] }): undefined => {
            if (tokenIds.length === 0) return;
            if (tokens === 0) {
              choice.firstToken();
              firstMs = world.nowMs - beganMs;
            } else gapsMs.push(world.nowMs - lastMs);
            lastMs = world.nowMs;
            tokens += tokenIds.length;
          };
          await handOffs.follow(choice, asked, request, signal, onEvent, (told) => {
            ({ line } = told);
          });
        } finally {
          choice.ended();
        }
      } catch (error) {
        if (!(error instanceof KvError) || error.code !== 'BUSY') throw error;
        isRefused = true;
      }
      const wholeMs = world.nowMs - beganMs;
      ended.push({ shape, isRefused, firstMs, gapsMs, wholeMs, isWhole: tokens === answerTokens, line });
    };
    let failure: unknown;
    const arrive = (one: Arriving, random: () => number): void => {
      if (world.nowMs >= seconds * 1_000) return;
      open++;
      ask(one)
        .catch((error: unknown) => {
          failure = error;
        })
        .finally(() => open--);
      const inS = -Math.log(1 - random()) / one.perS;
      world.schedule(Math.ceil(inS * 1e6), 'arrives', () => arrive(one, random));
    };
    // Each has chances of its own: whoever serves them, the same arrive.
    for (const [at, one] of arriving.entries()) {
      const random = seededRandom(arriving.length * seed + at);
      world.schedule(0, 'arrives', () => arrive(one, random));
    }
    const idleSinceMs = new Map<VirtualWorker, number>();
    const checkIdle = (): void => {
      const { waiting } = dispatch.stats();
      // A worker may be kept free for short ones.
      if (arriving.length > 1) return;
      for (const worker of all) {
        const isIdle = worker.record.role !== 'prefill' && worker.open.size === 0;
        if (waiting === 0 || !isIdle) idleSinceMs.delete(worker);
        else if (!idleSinceMs.has(worker)) idleSinceMs.set(worker, world.nowMs);
        else if (world.nowMs - idleSinceMs.get(worker)! > idleMs)
          throw new Error(`${worker.record.name} has nothing to do, and ${waiting} wait`);
      }
    };
    while ((open > 0 || world.nowMs < seconds * 1_000) && failure === undefined && (await world.step())) checkIdle();
    if (failure !== undefined) throw failure;
    if (open > 0) throw new Error(`${open} of ${count} requests never end`);
    const left = { ...countedBy(dispatch), legs: handOffs.legs, awaiting: handOffs.awaiting };
    if (Object.values(left).some((one) => one !== 0)) throw new Error(`all have ended, and ${JSON.stringify(left)}`);
    dispatch.close();
    return ended;
  } finally {
    uninstall();
  }
}

const countedBy = (dispatch: Dispatcher): { waiting: number; given: number } => {
  const { waiting, given } = dispatch.stats();
  return { waiting, given };
};
