/** The cache node as a process: configuration in, a node that runs until it is told to stop. */
import { cacheNodeSchema, readGroup, readKvEventsCurve, readPeerCredentials, readServiceConfig } from '@kvtier/config';
import { openCacheNode } from '@kvtier/node';
import { failpointFromEnv } from '@kvtier/placement';
import { systemClock } from '@kvtier/runtime';
import { createLogger, refusedRenewals, runService, tellRenewed } from '@kvtier/telemetry';

runService('cache-node', async () => {
  const config = readServiceConfig(cacheNodeSchema);
  const log = createLogger('cache-node', config.logLevel);
  const failpoint = failpointFromEnv(process.env);
  const onProblem = tellRenewed(log, 'peers: certificate or secret');
  const peers = config.peers && { ...config.peers, security: readPeerCredentials(config.peers.security, onProblem) };
  const onEventsProblem = tellRenewed(log, 'KV events: keys');
  const kvEvents = config.kvEvents && {
    ...config.kvEvents,
    curve: readKvEventsCurve(config.kvEvents, onEventsProblem),
  };
  const group = readGroup(config.group);
  const gauges = () => ({ 'renewals.refused': refusedRenewals() });
  const node = await openCacheNode({ ...config, group, peers, kvEvents, clock: systemClock, log, failpoint, gauges });
  log.info({ socket: config.socketPath, arena: node.arenaPath, dataDir: config.dataDir }, 'the cache node serves');
  return {
    ready: { socketPath: config.socketPath, arenaPath: node.arenaPath },
    close: () => node.close(),
  };
});
