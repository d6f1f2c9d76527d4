/** How workers are found, as far as it can be told before anybody is asked. */
import { accessSync, constants } from 'node:fs';
import type { DiscoveryConfig } from '@kvtier/config';
import { KvError } from '@kvtier/errors';

/** @throws KvError CONFIG what a start would be refused for */
export async function checkDiscovery(discovery: DiscoveryConfig): Promise<void> {
  if (discovery.kind === 'redis')
    return (await import('@kvtier/membership')).checkList(discovery.redis, 'discovery.redis');
  if (discovery.kind !== 'kubernetes' || discovery.kubeconfig === undefined) return;
  try {
    accessSync(discovery.kubeconfig, constants.R_OK);
  } catch (error) {
    const why = (error as Error).message;
    throw new KvError('CONFIG', `discovery.kubeconfig: cannot be read (${why}); name a readable kubeconfig`);
  }
}
