/**
 * What the machinery around a coordinator asks, on a listener of its own, so that it needs no key and clients do not reach it:
 *
 *   GET /health/live · GET /health/ready · GET /health · GET /metrics
 *
 * Live is whoever answers. Ready is who knows the members: that no worker serves is no reason to take a coordinator away, for the others
 * know no more, and it tells clients when to come again. `/health` is 503 then (health.ts).
 */
import type { FastifyInstance } from 'fastify';
import { type HealthParts, health } from './health.ts';
import { metricsContentType } from './metrics.ts';

export interface OperationsParts extends HealthParts {
  /** Members are known, and it is not closing. */
  readonly isReady: () => boolean;
  /** In Prometheus' text form. */
  readonly metricsText: () => Promise<string>;
}

export function addOperations(app: FastifyInstance, parts: OperationsParts): void {
  app.get('/health', (_request, reply) => health(reply, parts));
  app.get('/health/live', async () => ({ status: 'ok' }));
  app.get('/health/ready', async (_request, reply) =>
    parts.isReady() ? { status: 'ok' } : reply.code(503).send({ status: 'unavailable' }),
  );
  app.get('/metrics', async (_request, reply) =>
    reply.header('content-type', metricsContentType).send(await parts.metricsText()),
  );
}
