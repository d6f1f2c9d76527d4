/** How workers are found: as configured, or the one that is named. */
import type { ConfiguredMembers, CoordinatorConfig } from '@kvtier/config';
import { workerRecordSchema } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { Discovery } from '@kvtier/registry';

/** @throws KvError CONFIG: neither is there, or both are */
export function discoveryOf({ engine, discovery }: CoordinatorConfig): ConfiguredMembers {
  if ((engine === undefined) === (discovery === undefined))
    throw new KvError(
      'CONFIG',
      'coordinator: name one engine worker (engine) or how workers are found (discovery), not both',
    );
  if (discovery !== undefined) return discovery;
  return { kind: 'static', workers: [workerRecordSchema.parse({ name: 'engine', address: engine })], nodes: [] };
}

/** Members as they are configured. */
export const createDiscovery = (config: ConfiguredMembers): Discovery => ({
  kind: config.kind,
  async start(listener) {
    setImmediate(() => listener.changed(config));
  },
  async close() {},
});
