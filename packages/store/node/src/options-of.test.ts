/** How long a node writes down at its end: by itself, and where a supervisor has others to end before it. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { cacheNodeSchema, parseConfig } from '@kvtier/config';
import { defaultLimits } from '@kvtier/placement';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { expect, it, onTestFinished, vi } from 'vitest';
import { openCacheNode } from './node.ts';
import { optionsOf } from './options-of.ts';

const paths = { socketPath: '/s/node.sock', dataDir: '/d' };
const config = parseConfig(cacheNodeSchema, { ...paths, arena: { bytes: 1 << 20 }, disk: null }, 'test');

/** With the supervisor's channel, or without one. */
function drainMs(connected: boolean): number {
  const before = Object.getOwnPropertyDescriptor(process, 'connected');
  onTestFinished(() => {
    if (before !== undefined) Object.defineProperty(process, 'connected', before);
    else Reflect.deleteProperty(process, 'connected');
  });
  Object.defineProperty(process, 'connected', { value: connected, configurable: true });
  return optionsOf(config, undefined as never).closeDrainMs ?? defaultLimits(config.arena.bytes).closeDrainMs;
}

it('of the 8 s of a process it takes five, of the 4.5 s that kvtier up leaves it at least, 2.5', () => {
  expect([drainMs(false), drainMs(true)]).toEqual([5_000, 2_500]);
});

it('and so long it waits for its disk', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-options-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const after = vi.spyOn(systemClock, 'after');
  onTestFinished(() => after.mockRestore());
  for (const closeDrainMs of [2_500, undefined]) {
    const node = await openCacheNode({
      ...{ socketPath: join(folder, 'node.sock'), dataDir: join(folder, 'data'), clock: systemClock, log: silent },
      arena: { bytes: 4 << 20, dir: '/dev/shm' },
      disk: parseConfig(cacheNodeSchema, { ...paths, arena: { bytes: 4 << 20 }, disk: { bytes: 64 << 20 } }, 'test')
        .disk,
      closeDrainMs,
    });
    after.mockClear();
    await node.close();
    expect(after.mock.calls.map(([ms]) => ms)).toContain(closeDrainMs ?? 5_000);
  }
});
