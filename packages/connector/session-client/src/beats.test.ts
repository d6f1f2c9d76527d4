/** A node whose answers come too late, beside a pulse that beats or does not; by a clock of the test's own. */
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { connect, createServer } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { ClientFrame, FrameReader, ServerFrame, writeFrame } from '@kvtier/wire';
import { expect, it, onTestFinished } from 'vitest';
import { SessionLink } from './session-link.ts';
import { ManualTimers } from './testing/manual-timers.ts';
import { until } from './testing/rig.ts';

/** A link, and what a node that answers nothing was asked for. `stillMs`: of its pulse, at a time; null: it has none. */
async function silent(stillMs: ((nowMs: number) => number | undefined) | null) {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-beats-'));
  const asked: string[] = [];
  const server = createServer((socket) => {
    const reader = new FrameReader((message) => asked.push(ClientFrame.decode(message).body!.$case));
    socket.on('data', (chunk) => reader.push(chunk));
    socket.on('error', () => {});
    writeFrame(socket, ServerFrame.encode({ id: 0n, bootEpoch: 1n, body: undefined }).finish()); // it has answered before
  }).listen(join(folder, 's'));
  await once(server, 'listening');
  const clock = new ManualTimers();
  const suspendedAtMs: number[] = [];
  const link = new SessionLink(connect(join(folder, 's')), clock, () => suspendedAtMs.push(clock.nowMs()));
  onTestFinished(() => {
    link.end(new KvError('DISCONNECTED', 'the test is over'));
    server.close();
    rmSync(folder, { recursive: true });
  });
  await until(() => link.epoch !== undefined, 'its first word');
  link.pulse = stillMs === null ? null : { stillMs: () => stillMs(clock.nowMs()) };
  await clock.pass(1); // later than what was heard
  const lookUp = async (deadlineMs: number): Promise<void> => {
    const value = { hashes: Buffer.alloc(8) };
    const ended = link.call({ $case: 'lookup', value }, 'lookup', deadlineMs);
    const failed = expect(ended).rejects.toMatchObject({ code: 'DEADLINE' });
    await clock.pass(deadlineMs);
    await failed;
  };
  return { asked, clock, link, lookUp, suspendedAtMs };
}

it('two deadlines without a frame are a standstill where there is no pulse', async () => {
  const { lookUp, suspendedAtMs } = await silent(null);
  await lookUp(50);
  expect(suspendedAtMs).toEqual([]);
  await lookUp(50);
  expect(suspendedAtMs).toEqual([101]);
});

it('beside a pulse that beats they are none: the node is asked for a sign of life, and goes on being asked', async () => {
  const { asked, link, lookUp, suspendedAtMs } = await silent(() => 20);
  for (let at = 0; at < 10; at++) await lookUp(100);
  await until(() => asked.length === 11, 'what was asked');
  expect(asked.filter((what) => what === 'stats')).toHaveLength(1);
  expect([link.usable, suspendedAtMs]).toEqual([true, []]);
});

it('one that beats and gives no sign of life costs no more deadlines after 1.2 seconds', async () => {
  const { link, lookUp, suspendedAtMs } = await silent(() => 20);
  for (let at = 0; at < 14; at++) await lookUp(100);
  expect(suspendedAtMs).toEqual([1_401]); // asked for a sign after 201
  expect(link.usable).toBe(false);
});

it('a turn of its event loop that does not end is a standstill beside any pulse', async () => {
  const { lookUp, suspendedAtMs } = await silent(() => 600);
  await lookUp(200);
  await lookUp(200);
  expect(suspendedAtMs).toEqual([401]);
});

it('deadlines shorter than a few beats are looked at again when it would have beaten', async () => {
  const { clock, lookUp, suspendedAtMs } = await silent((nowMs) => (nowMs < 100 ? 0 : undefined));
  await lookUp(60);
  await lookUp(60); // sent at 61, and before 100 it has not been looked at
  expect(suspendedAtMs).toEqual([]);
  await clock.pass(200);
  expect(suspendedAtMs).toEqual([211]);

  const beats = await silent((nowMs) => (nowMs === 211 ? 0 : undefined));
  await beats.lookUp(60);
  await beats.lookUp(60);
  await beats.clock.pass(200);
  expect(beats.suspendedAtMs).toEqual([]);
});
