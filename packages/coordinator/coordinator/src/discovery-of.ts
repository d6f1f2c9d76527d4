/** How workers are found: as configured, or the one that is named. */
import { type CoordinatorConfig, type DiscoveryConfig, workerRecordSchema } from '@kvtier/config';
import { KvError } from '@kvtier/errors';

/** @throws KvError CONFIG: neither is there, or both are */
export function discoveryOf({ engine, discovery }: CoordinatorConfig): DiscoveryConfig {
  if ((engine === undefined) === (discovery === undefined))
    throw new KvError(
      'CONFIG',
      'coordinator: name one engine worker (engine) or how workers are found (discovery), not both',
    );
  if (discovery !== undefined) return discovery;
  return { kind: 'static', workers: [workerRecordSchema.parse({ name: 'engine', address: engine })], nodes: [] };
}
