/** A Cluster one of whose servers says nothing: how long whoever asks which server has what waits for it. */
import { Cluster } from 'ioredis';
import { afterEach, expect, it, vi } from 'vitest';
import { RedisCommands } from './redis-commands.ts';
import { defaultSettings, type RedisSettings } from './settings.ts';

const settings = {
  ...{ ...defaultSettings, mode: 'cluster', servers: ['redis://127.0.0.1:1'], bytes: 1024 },
  ...{ connections: 1, depth: 1, timeLimitMs: 60_000 },
} as const satisfies RedisSettings;

let commands: RedisCommands;
afterEach(() => {
  vi.useRealTimers();
  vi.restoreAllMocks();
  commands.close();
});

it('which server has what: asked of the one that says nothing, that is waited for only a moment', async () => {
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
  commands = new RedisCommands(settings, () => {});
  vi.spyOn(Cluster.prototype, 'refreshSlotsCache').mockImplementation(() => {});
  let isOver = false;
  void commands.topologyRefreshed().then(() => {
    isOver = true;
  });
  await vi.advanceTimersByTimeAsync(199);
  expect(isOver).toBe(false);
  await vi.advanceTimersByTimeAsync(1);
  expect(isOver).toBe(true);
});
