/** Connections that carry no request keep nobody out: clients neither, nor probes; and those that carry one are not given up for others. */
import { connect, type Socket } from 'node:net';
import { say } from '@kvtier/registry/testing';
import { afterEach, expect, it, vi } from 'vitest';
import { Harness, ids } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000, interval: 5 };
const held: Socket[] = [];
afterEach(() => {
  for (const one of held.splice(0)) one.destroy();
});

/** So many that say nothing. */
async function idle(url: string, many: number): Promise<void> {
  for (let left = many; left > 0; left--) {
    const socket = connect(Number(new URL(url).port), '127.0.0.1');
    held.push(socket.on('error', () => {}));
    await new Promise((resolve) => socket.once('connect', resolve));
  }
}
const areClosed = (many: number) =>
  vi.waitUntil(() => held.filter(({ closed, readableEnded }) => closed || readableEnded).length === many, patience);
const get = (url: string): Promise<Response> => fetch(url, { headers: { connection: 'close' } });

it('of probes: the longest idle gives way', async () => {
  await at.open({ operations: { host: '127.0.0.1', port: 0 } });
  await idle(at.server.operationsUrl!, 256);
  for (const one of held) one.resume();
  expect((await get(`${at.server.operationsUrl}/health/live`)).status).toBe(200);
  await areClosed(1);
  expect(held[0]!.readableEnded).toBe(true);
});

it('of clients: however many come', async () => {
  await at.open({ limits: { connections: 4 } });
  await idle(at.server.url, 20);
  for (const one of held) one.resume();
  expect((await get(`${at.server.url}/v1/models`)).status).toBe(200);
  await areClosed(20 - 3);
});

it('where all carry requests, who comes is closed, and they go on', async () => {
  await at.open({ limits: { connections: 2 } });
  const answers: (() => void)[] = [];
  at.engine.script = (call) => void answers.push(() => void say(ids(' 34'), 'length')(call));
  const ask = (): Promise<Response> =>
    at.post(
      '/v1/completions',
      { prompt: 'a' },
      { headers: { 'content-type': 'application/json', connection: 'close' } },
    );
  const running = [ask(), ask()];
  await vi.waitUntil(() => at.dispatcher.stats().given === 2 && answers.length === 2, patience);
  await expect(get(`${at.server.url}/v1/models`)).rejects.toThrow();
  for (const end of answers) end();
  expect((await Promise.all(running)).map(({ status }) => status)).toEqual([200, 200]);
});
