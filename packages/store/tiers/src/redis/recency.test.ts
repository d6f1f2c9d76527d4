/** Uses on their way to the servers: how many a turn, in which order, and who waits for them. */
import { expect, it } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { ServerRecency } from './recency.ts';
import { RedisIndex } from './redis-index.ts';
import type { RedisService } from './service.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 10_000 }, (_, i) => hashNamed(i));

/** `answer`: of the server, to each batch of uses. */
function recencyWith(answer: () => Promise<void>) {
  const index = new RedisIndex();
  for (const hash of chain) index.set(space, hash, '20256 4096 n.1', 0);
  const times: number[] = [];
  const touch = (uses: readonly { usedUs: number }[]): Promise<void> => {
    for (const { usedUs } of uses) times.push(usedUs);
    return answer();
  };
  const failed: unknown[][] = [];
  const commandFailed = (...told: unknown[]): void => void failed.push(told);
  const service = { reachable: true, directories: [{ touch }], commandFailed };
  return { recency: new ServerRecency(index, service as unknown as RedisService), times, service, failed };
}

const turn = (): Promise<void> => new Promise((resolve) => void setImmediate(resolve));

it('many take several turns, parents first, and whoever asks meanwhile waits for all of them', async () => {
  const { recency, times } = recencyWith(async () => {});
  recency.touch(space, chain);
  const { sent, known } = recency.flush();
  expect(times.length).toBe(4096);
  expect(recency.flush().sent).toBe(sent);
  await turn();
  expect(times.length).toBe(8192);
  await sent;
  expect(times.length).toBe(chain.length);
  expect(times.every((time, i) => i === 0 || time < times[i - 1]!)).toBe(true);
  await known;
  expect(recency.flush().sent).toBeUndefined();
});

it('few are sent at once, also by who comes after many', async () => {
  const { recency, times } = recencyWith(async () => {});
  recency.touch(space, chain);
  await recency.flush().known;
  recency.touch(space, chain.slice(0, 100));
  expect(recency.flush().sent).toBeUndefined();
  expect(times.length).toBe(chain.length + 100);
});

it('what a server refuses is told of its partition, and the rest is sent', async () => {
  let batches = 0;
  const refusal = new Error('refused');
  const { recency, times, service, failed } = recencyWith(async () => {
    if (++batches === 1) throw refusal;
  });
  recency.touch(space, chain);
  await recency.flush().known;
  expect(failed).toEqual([[refusal, service.directories[0]]]);
  expect(times.length).toBe(chain.length);
});

it('nothing more is sent to servers that are lost meanwhile', async () => {
  const { recency, times, service } = recencyWith(async () => {});
  recency.touch(space, chain);
  const { sent } = recency.flush();
  service.reachable = false;
  await sent;
  expect(times.length).toBe(4096);
});
