/** What is told of servers that cannot be reached for one reason, and then for another. */
import { once } from 'node:events';
import { createServer } from 'node:net';
import { nodeRecordSchema } from '@kvtier/config';
import { afterEach, expect, it, vi } from 'vitest';
import { announceNode, MemberReader } from './index.ts';
import { Reasons } from './reasons.ts';
import { Lines, memberServers } from './testing/index.ts';

const ends: (() => unknown)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

it('the first one at once, another one after a pause that grows, and the first again when all was well', () => {
  const reasons = new Reasons();
  const told: string[] = [];
  // Of two that take turns.
  for (let second = 0; second < 60; second++) {
    const why = second % 2 === 0 ? 'refused' : 'late';
    if (reasons.isNews(why, second * 1_000)) told.push(`${second} ${why}`);
  }
  expect(told).toEqual(['0 refused', '5 late', '16 refused', '37 late']);
  const isNews = [undefined, undefined, 'late', 'late'].map((why) => reasons.isNews(why, 60_000));
  expect(isNews).toEqual([true, false, true, false]);
  // The pause is the first one again.
  expect([64_999, 65_000].map((nowMs) => reasons.isNews('refused', nowMs))).toEqual([false, true]);
});

it('a server that is not there, and then refuses the password: both are told, of the list and of the own record', async () => {
  // A free port, at which nobody listens yet.
  const server = createServer();
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  const { port } = server.address() as { port: number };
  server.close();
  await once(server, 'close');

  const now = performance.now.bind(performance);
  let aheadMs = 0;
  const clock = vi.spyOn(performance, 'now').mockImplementation(() => now() + aheadMs);
  ends.push(() => clock.mockRestore());
  const redis = memberServers([`redis://127.0.0.1:${port}`], 'single', 'kvtier:', 500);
  const lines = new Lines();
  const problem = (why: string | undefined): void => lines.warn({}, `problem: ${why}`);
  const reader = new MemberReader({ ...{ redis, pollMs: 20, log: lines, problem }, changed: () => {} });
  ends.push(() => reader.close());
  const node = announceNode(nodeRecordSchema.parse({ name: 'n' }), { redis, leaseMs: 1_500, log: lines });
  ends.push(() => node.close());
  await Promise.all([lines.until(/problem/), lines.until(/cannot be reached/)]);
  expect(lines.all.map((line) => line.includes('ECONNREFUSED'))).toEqual([true, true]);

  const answering = createServer((socket) => {
    ends.push(() => socket.destroy());
    socket.on('error', () => {});
    socket.on('data', (data) => {
      const commands = data.toString().match(/\*\d+\r\n/g)?.length ?? 0;
      socket.write('-WRONGPASS invalid username-password pair or user is disabled.\r\n'.repeat(commands));
    });
  });
  answering.listen(port, '127.0.0.1');
  await once(answering, 'listening');
  ends.push(() => answering.close());
  aheadMs = 5_000;
  await Promise.all([lines.until(/problem.*WRONGPASS/), lines.until(/cannot be reached .*WRONGPASS/)]);
  expect(lines.all.map((line) => line.includes('WRONGPASS'))).toEqual([false, false, true, true]);
  expect(node.state).toBe('away');
});
