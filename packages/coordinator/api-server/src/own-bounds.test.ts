/** Bounds of the coordinator itself: a client is told that it is these, and not its workers. */
import { Pod } from '@kvtier/registry/testing';
import { expect, it, vi } from 'vitest';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const told = async (response: Response): Promise<unknown> => [
  response.status,
  ((await response.json()) as { error: { message: string } }).error.message,
];

it('requests in progress', async () => {
  await at.open({ limits: { requests: 1 } });
  const asked = at.post('/v1/completions', { prompt: [5], max_tokens: 1 });
  await vi.waitUntil(() => at.engine.seen.length === 1, patience);
  expect(await told(await at.post('/v1/completions', { prompt: [5] }))).toEqual([
    429,
    "this coordinator's own bound: 1 requests are in progress; try again later",
  ]);
  await at.server.close();
  await asked;
});

it('bodies that wait for pods', async () => {
  const pod = Object.assign(new Pod(), { model: 'pods' });
  await pod.start();
  try {
    await at.open({ limits: { heldBytes: 1_000 } });
    await at.workers({ name: 'one', kind: 'openai', address: pod.address });
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
    const ask = () => at.post('/v1/completions', { model: 'pods', prompt: 'a'.repeat(600) });
    const first = ask();
    await vi.waitUntil(() => pod.seen.length === 1, patience);
    expect(await told(await ask())).toEqual([
      429,
      "this coordinator's own bound: bodies of more than 1000 bytes would wait for their workers; try again later",
    ]);
    pod.answer = ({ response }) => void response.end('{}');
    pod.seen[0]!.response.end('{}');
    expect([(await first).status, (await ask()).status]).toEqual([200, 200]);
    // An answer that has begun is never asked for again.
    pod.answer = ({ response }) =>
      void response
        .writeHead(200, { 'content-type': 'text/event-stream' })
        .write('data: {"choices":[{"text":"a"}]}\n\n');
    const open = [await ask(), await ask(), await ask()];
    expect(open.map(({ status }) => status)).toEqual([200, 200, 200]);
    await Promise.all(open.map(({ body }) => body!.cancel()));
  } finally {
    await pod.stop();
  }
});
