/** GET /health: 200 while a worker serves and running answers move; each worker's state, and what else the coordinator knows of itself. */
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import type { FastifyReply } from 'fastify';
import type { Engines } from './engines.ts';
import { toHttpError } from './errors.ts';
import type { Generation } from './generation.ts';
import { type Models, whyOf } from './models.ts';

export interface HealthParts {
  readonly models: Models;
  readonly engines: Engines;
  readonly generation: Pick<Generation, 'progress'>;
  readonly stallMs: number;
  readonly degraded: () => readonly string[];
  readonly parts: () => Readonly<Record<string, unknown>>;
}

/** Workers that are named one by one. */
const maxListed = 256;

export async function health(reply: FastifyReply, parts: HealthParts): Promise<unknown> {
  const { models, engines, generation, stallMs } = parts;
  const { running, finished, silentMs } = generation.progress;
  const workers = engines.workers().filter((worker) => worker !== undefined);
  const known = {
    models: models.all().map(({ name }) => name),
    workers: workers.slice(0, maxListed).map(cardOf),
    degraded: parts.degraded(),
    ...parts.parts(),
    progress: { running, finished, silent_ms: silentMs },
  };
  try {
    models.served();
    const serving = workers.filter(({ state }) => state === 'ready');
    if (serving.length === 0) throw new KvError('DISCONNECTED', whyNone(workers), { retry: true });
    if (silentMs > stallMs)
      throw new KvError('DEADLINE', `engine: ${running} answers run, without a token for ${silentMs} ms`);
    const [only] = serving;
    const engine = workers.length === 1 && only!.record.kind === 'kvtier' ? await engineOf(engines, only!) : {};
    return { status: 'ok', ...engine, ...known };
  } catch (error) {
    return reply.code(503).send({ status: 'unavailable', ...toHttpError(error).body, ...known });
  }
}

/** Asked now, for one that is alone. @throws KvError */
async function engineOf(engines: Engines, { number }: Worker): Promise<object> {
  const engine = await engines.engine(number).describe();
  return {
    engine: {
      model: engine.model,
      backend: engine.backend,
      max_model_tokens: engine.maxModelTokens,
      tier_attached: engine.tierAttached,
      block_tokens: engine.blockTokens,
      block_count: Number(engine.blockCount),
      block_bytes: Number(engine.blockBytes),
    },
  };
}

const cardOf = ({ record: { name, kind, role }, state, why, facts, load }: Worker) => ({
  name,
  kind,
  role,
  state,
  ...(why !== undefined && { why }),
  ...(facts !== undefined && { model: facts.model }),
  waiting: load.waiting,
  running: load.running,
});

const whyNone = (workers: readonly Worker[]): string =>
  whyOf(workers) ?? `engine: none of ${workers.length} workers takes requests; try again`;
