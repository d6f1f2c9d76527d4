/** What the API server answers, by path. */
import type { FastifyInstance, FastifyRequest } from 'fastify';
import { Admin } from './admin.ts';
import { bodyOf } from './bodies.ts';
import type { Engines } from './engines.ts';
import type { Generation } from './generation.ts';
import { type HealthParts, health } from './health.ts';
import { metricsContentType, type RequestMetrics } from './metrics.ts';
import type { Model, Models } from './models.ts';
import { parseDrain } from './params.ts';
import type { TextPool } from './text-pool.ts';
import { smallJson, unknownModel } from './understand.ts';
import type { SharedMetrics } from './worker-metrics.ts';

export interface Parts extends HealthParts {
  readonly models: Models;
  readonly engines: Engines;
  readonly text: TextPool;
  readonly generation: Generation;
  readonly metrics: RequestMetrics;
  readonly workerMetrics: SharedMetrics;
  readonly plans: () => readonly unknown[];
  readonly moreMetrics: () => Promise<string>;
}

type MetricsParts = Pick<Parts, 'metrics' | 'workerMetrics' | 'engines' | 'moreMetrics'>;

export function addRoutes(app: FastifyInstance, parts: Parts): void {
  const { models, engines, text, generation, plans } = parts;
  const admin = new Admin(engines);
  const understood = <K extends 'pin' | 'unpin'>(kind: K, request: FastifyRequest) => {
    const served = models.served().map((model) => model.text);
    return bodyOf(request).use((bytes) => text.run(kind, served, bytes));
  };
  app.post('/v1/completions', (request, reply) => generation.completions(request, reply));
  app.post('/v1/chat/completions', (request, reply) => generation.chat(request, reply));
  app.get('/v1/models', async () => ({ object: 'list', data: models.named().map(modelCard) }));
  app.get<{ Params: { '*': string } }>('/v1/models/*', async (request) => {
    const name = request.params['*']; // served names may hold a slash
    models.served();
    const model = models.get(name);
    if (model === undefined) throw unknownModel(name);
    return modelCard(model);
  });
  app.get('/health', (_request, reply) => health(reply, parts));
  app.get('/metrics', async (_request, reply) =>
    reply.header('content-type', metricsContentType).send(await metricsTextOf(parts)),
  );
  app.get('/admin/planner', async () => ({ models: plans() }));
  app.post('/admin/reset_prefix_cache', () => admin.resetPrefixCache());
  app.post('/admin/pin_prefix', async (request) => {
    const { model, name, prompt, cacheSalt } = await understood('pin', request);
    return admin.pinPrefix(model, { name, promptTokenIds: [...prompt], cacheSalt });
  });
  app.post('/admin/unpin_prefix', async (request) => {
    const { model, name } = await understood('unpin', request);
    return admin.unpinPrefix(model, name);
  });
  app.post('/admin/drain', async (request) =>
    admin.drain(await bodyOf(request).use(async (bytes) => parseDrain(smallJson(new Uint8Array(bytes))).worker)),
  );
}

/** Ours, and those of our own workers. */
export async function metricsTextOf({ metrics, workerMetrics, engines, moreMetrics }: MetricsParts): Promise<string> {
  const own = await metrics.text(engines);
  const texts = [own, await moreMetrics(), await workerMetrics.text()].map((part) => part.trimEnd());
  return `${texts.filter((part) => part !== '').join('\n')}\n`;
}

/** `root` as vLLM has it, whose `bench serve` takes it for the name of a tokenizer: of adapters and other names the model's. */
const modelCard = ({ name, parent, text, createdSeconds, maxModelTokens }: Model) => ({
  id: name,
  object: 'model',
  created: createdSeconds,
  owned_by: 'kvtier',
  root: text.model.name,
  max_model_len: maxModelTokens,
  ...(parent !== undefined && { parent }),
});
