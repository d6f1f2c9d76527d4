import { expect, it } from 'vitest';
import { processMetrics, Registry } from './metrics.ts';
import { version } from './version.ts';

it('a process says which version runs', async () => {
  const registry = new Registry();
  processMetrics('engine', registry);
  expect((await registry.metrics()).split('\n')).toContain(`kvtier_engine_build_info{version="${version}"} 1`);
});
