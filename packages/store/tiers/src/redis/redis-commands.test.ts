/** A Cluster one of whose servers says nothing, or refuses: what that costs whoever asks all of them. */
import { Cluster, type Redis } from 'ioredis';
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

it.each(['NOPERM this user has no permissions', 'Connection is closed.'])(
  'scripts that one server does not take (%s) are of no consequence to the others, but where nothing was in service yet and waiting mends nothing',
  async (reason) => {
    commands = new RedisCommands(settings, () => {});
    const loaded: string[] = [];
    const well = { call: async (...args: string[]) => loaded.push(args[2]!) } as unknown as Redis;
    const ill = { call: () => Promise.reject(new Error(reason)) } as unknown as Redis;
    vi.spyOn(Cluster.prototype, 'nodes').mockReturnValue([ill, well]);
    await commands.loadScripts(false);
    expect(loaded.length).toBeGreaterThan(3);
    if (reason.startsWith('NOPERM'))
      await expect(commands.loadScripts(true)).rejects.toMatchObject({ code: 'CONFIG', retry: false });
    else await commands.loadScripts(true);
  },
);

it('the keys of partitions are the same at every node, for ever', () => {
  commands = new RedisCommands({ ...settings, partitions: 16 }, () => {});
  const tags = commands.partitions().map(({ base, slot }) => `${/^kvtier:\{(.*)\}:$/.exec(base)?.[1]} ${slot}`);
  expect(tags).toEqual([
    'p0.41 907',
    'p1.42 1372',
    'p2.3 2665',
    'p3 3689',
    'p4.22 5055',
    'p5.21 5480',
    'p6.11 7143',
    'p7.12 7472',
    'p8.61 8234',
    'p9.62 9981',
    'p10.62 11055',
    'p11.61 11768',
    'p12.43 12292',
    'p13.40 14035',
    'p14.12 14409',
    'p15.11 16030',
  ]);
  commands.close();
  commands = new RedisCommands({ ...settings, mode: 'single', keyPrefix: 'other:' }, () => {});
  const keys = ['ledger', 'blocks', 'recency', 'leases', 'expiry', 'events'].map((name) => `other:{p0}:${name}`);
  expect(commands.partitions()).toEqual([{ index: 0, base: 'other:{p0}:', keys, slot: 15_882 }]);
});
