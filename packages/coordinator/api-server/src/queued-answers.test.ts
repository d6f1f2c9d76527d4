/** Clients that send several requests on one connection without waiting for the answers before, and leave: nothing of them stays. */
import { once } from 'node:events';
import { connect, type Socket } from 'node:net';
import { Pod } from '@kvtier/registry/testing';
import { afterEach, expect, it, vi } from 'vitest';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const clients: Socket[] = [];
afterEach(() => {
  for (const client of clients.splice(0)) client.destroy();
});

/** Reads nothing. */
async function client(text: string, url = at.server.url): Promise<Socket> {
  const made = connect(Number(new URL(url).port), '127.0.0.1');
  clients.push(made);
  made.on('error', () => {});
  await once(made, 'connect');
  made.write(text);
  return made;
}
const posted = (route: string, body: object): string => {
  const text = JSON.stringify(body);
  const head = 'host: 127.0.0.1\r\ncontent-type: application/json';
  return `POST ${route} HTTP/1.1\r\n${head}\r\ncontent-length: ${text.length}\r\n\r\n${text}`;
};

it('answers that wait for an earlier one of our own workers end with their connection', async () => {
  await at.open({ limits: { requests: 8 } });
  at.engine.script = () => {}; // never a token
  const counted = async (): Promise<number> => {
    const counts = (await at.metricsText()).matchAll(/^kvtier_requests_total\{route="[^"]*",status="499"\} (\d+)$/gm);
    return [...counts].reduce((sum, [, count]) => sum + Number(count), 0);
  };
  const again = 'GET /v1/models HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n'.repeat(5);
  for (let round = 1; round <= 20; round++) {
    const generates = posted('/v1/completions', { prompt: [5], max_tokens: 1 });
    const one = await client(generates + generates + again);
    await vi.waitUntil(() => at.engine.seen.length === 2 * round, patience);
    one.destroy();
    await vi.waitUntil(async () => (await counted()) === 7 * round, patience);
  }
  expect((await fetch(`${at.server.url}/v1/models`)).status).toBe(200);
  await Promise.all(at.engine.seen.map(({ cancelled }) => cancelled));
}, 60_000);

it('thousands of requests at once cost their connection, whoever sends them, and nobody else', async () => {
  await at.open({ limits: { requests: 100 } });
  for (let round = 0; round < 3; round++) {
    const many = await client('GET /v1/nothing HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n'.repeat(2_000));
    await new Promise((resolve) => many.resume().once('close', resolve)); // reset, or ended
    expect((await fetch(`${at.server.url}/v1/models`)).status).toBe(200);
  }
  const unread = await client('GET /v1/nothing HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n'.repeat(20));
  await once(unread.resume(), 'data'); // few are answered
}, 60_000);

it('answers of a pod that wait for an earlier one end with their connection, at the pod, too', async () => {
  const pod = Object.assign(new Pod(), { model: 'pods' });
  await pod.start();
  try {
    await at.open();
    await at.workers({ name: 'one', kind: 'openai', address: pod.address });
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, patience);
    // The first one is silent, the second one streams.
    pod.answer = ({ body, response }) => {
      if (body.includes('second'))
        response.writeHead(200, { 'content-type': 'text/event-stream' }).write('data: 1\n\n');
    };
    const chat = (content: string) =>
      posted('/v1/chat/completions', { model: 'pods', stream: true, messages: [{ role: 'user', content }] });
    for (let round = 1; round <= 5; round++) {
      const one = await client(chat('first') + chat('second'));
      await vi.waitUntil(() => pod.seen.length === 2 * round, patience);
      // The stream's first event is there, and waits.
      await vi.waitUntil(() => at.fleet.workers().some((worker) => worker?.load.running === 1), patience);
      one.destroy();
      await Promise.all(pod.seen.map(({ left }) => left));
      await vi.waitUntil(() => at.fleet.workers().every((worker) => !worker?.load.running), patience);
    }
    await vi.waitUntil(async () => (await at.metricsText()).includes('kvtier_requests_running 0\n'), patience);
    await vi.waitUntil(() => at.dispatcher.stats().given === 0, patience);
    for (const worker of at.fleet.workers()) if (worker) expect(worker.load).toMatchObject({ waiting: 0, running: 0 });
  } finally {
    await pod.stop();
  }
}, 60_000);
