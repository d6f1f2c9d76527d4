/** A Redis tier over the arena of a TestBench, small and quick. */
import { ArenaMemory } from '../../arena/arena-memory.ts';
import { silentLog, type TestBench } from '../../kit/testing/objects.ts';
import { RedisTier } from '../redis-tier.ts';
import { defaultSettings, type RedisSettings, type RedisTierOptions } from '../settings.ts';

export const testArenaBytes = 32 << 20;

export function openTier(
  bench: TestBench,
  settings: Partial<RedisSettings> & Pick<RedisSettings, 'servers'>,
  options: Partial<RedisTierOptions> = {},
): Promise<RedisTier> {
  return RedisTier.open({
    settings: { ...defaultSettings, bytes: 2 << 20, partBytes: 4096, ...settings },
    arena: bench.arena,
    memory: new ArenaMemory(bench.arena, testArenaBytes),
    slots: bench.tier,
    log: silentLog,
    pollMs: 50,
    ...options,
  });
}
