/** Discovery, as the configuration has it. */
import type { DiscoveryConfig } from '@kvtier/config';
import type { Log } from '@kvtier/runtime';
import type { Discovery } from './discovery.ts';
import { KubernetesDiscovery } from './kubernetes/kubernetes-discovery.ts';
import { RedisDiscovery } from './redis-discovery.ts';
import { StaticDiscovery } from './static-discovery.ts';

export function createDiscovery(config: DiscoveryConfig, log: Log): Discovery {
  switch (config.kind) {
    case 'static':
      return new StaticDiscovery(config, log);
    case 'redis':
      return new RedisDiscovery(config, log);
    case 'kubernetes':
      return new KubernetesDiscovery(config, log);
  }
}
