/** One log line a request: who had it, why, what was predicted and seen, under the client's own names. */
import { say } from '@kvtier/registry/testing';
import { createLogger } from '@kvtier/telemetry';
import { expect, it, vi } from 'vitest';
import { Harness, ids } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000, interval: 5 };
const traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';

async function opened(logRequests?: boolean): Promise<Record<string, unknown>[]> {
  const lines: Record<string, unknown>[] = [];
  const logger = createLogger('api-server-test', 'silent');
  vi.spyOn(logger, 'info').mockImplementation((fields: unknown, line?: string) => {
    if (line === 'request') lines.push(fields as Record<string, unknown>);
  });
  await at.open({ logger, ...(logRequests !== undefined && { logRequests }) });
  at.engine.script = say(ids(' 34'), 'length');
  return lines;
}
const ask = (headers: Record<string, string>, body: object = { prompt: 'a', max_tokens: 1 }): Promise<Response> =>
  at.post('/v1/completions', body, { headers: { 'content-type': 'application/json', ...headers } });

it('of a request that is served: by whom and why, predicted and seen', async () => {
  const lines = await opened(true);
  await (await ask({ 'x-request-id': 'mine', traceparent }, { prompt: 'a secret', max_tokens: 1 })).text();
  await vi.waitUntil(() => lines.length === 1, patience);
  expect(lines[0]).toMatchObject({
    ...{ request: 'mine', traceparent, route: '/v1/completions', model: 'demo', status: 200, worker: 'a' },
    ...{ policy: 'predicted', why: expect.stringContaining('computes'), held: '0 blocks' },
    ...{ predictedFirstTokenMs: expect.any(Number), firstTokenMs: expect.any(Number), ms: expect.any(Number) },
  });
  // The worker's own line says the same two.
  expect(at.engine.seen[0]!.request).toMatchObject({ requestId: lines[0]!.workerRequest, traceparent });
  expect(JSON.stringify(lines[0])).not.toContain('secret');
});

it('of one that is refused: what its client was told; a traceparent that is none is not taken over', async () => {
  const lines = await opened(true);
  for (const none of [
    '',
    'x',
    `${traceparent}0`,
    traceparent.replace(/^00/, 'ff'),
    traceparent.replace(/b7-01/, 'B7-01'),
  ]) {
    await (await ask({ traceparent: none }, { prompt: 'a', max_tokens: 0 })).text();
    await vi.waitUntil(() => lines.length === 1, patience);
    expect(lines.pop()).toMatchObject({
      status: 400,
      failure: expect.stringContaining('max_tokens'),
      traceparent: undefined,
    });
  }
  const zero = '00-00000000000000000000000000000000-00f067aa0ba902b7-01';
  await (await ask({ traceparent: zero })).text();
  await vi.waitUntil(() => lines.length === 1, patience);
  expect(lines[0]).toMatchObject({ status: 200, traceparent: undefined });
  expect(at.engine.seen[0]!.request.traceparent).toBeUndefined();
});

it('none where it is not asked for', async () => {
  const lines = await opened();
  await (await ask({})).text();
  await at.server.close();
  expect(lines).toEqual([]);
});
