/** What real Redis servers hold of ours, by their own word: the judge of a budget that nodes share. */
import type { RedisServer } from '../../infra/redis/servers.ts';

/** Bytes of all values under our prefix, asked from the servers. */
export async function heldBytes(servers: readonly RedisServer[]): Promise<number> {
  const script = `local sum = 0 for _, key in ipairs(redis.call('keys', '*:v:*')) do sum = sum + redis.call('strlen', key) end return sum`;
  const held = await Promise.all(servers.map((server) => server.cli('eval', script, '0').catch(() => '0')));
  return held.reduce((sum, text) => sum + (Number(text) || 0), 0);
}

/** Asks again and again; `end` tells the most that was seen. */
export function watch(servers: () => readonly RedisServer[]): { end(): Promise<number> } {
  let most = 0;
  let running = true;
  const run = (async () => {
    while (running) {
      most = Math.max(most, await heldBytes(servers()));
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  })();
  return {
    end: async () => {
      running = false;
      await run;
      return most;
    },
  };
}
