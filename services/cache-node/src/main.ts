/** The cache node as a process: configuration in, a node that runs until it is told to stop. */
import { cacheNodeSchema, readGroup, readKvEventsCurve, readPeerCredentials, readServiceConfig } from '@kvtier/config';
import { openCacheNode } from '@kvtier/node';
import { failpointFromEnv } from '@kvtier/placement';
import { systemClock } from '@kvtier/runtime';
import { refusedRenewals, runService, serviceLogger, tellRenewed } from '@kvtier/telemetry';

runService('cache-node', async ({ configFile }) => {
  const config = readServiceConfig(cacheNodeSchema, configFile);
  const log = serviceLogger('cache-node', config.logLevel);
  const [peering, events, failpoint] = [config.peers, config.kvEvents, failpointFromEnv(process.env)];
  const security = peering && readPeerCredentials(peering.security, tellRenewed(log, 'peers: certificate or secret'));
  const curve = events && readKvEventsCurve(events, tellRenewed(log, 'KV events: keys'));
  const peers = peering && { ...peering, security: security! };
  const kvEvents = events && { ...events, curve };
  const told = (what: string) => ({ onProblem: tellRenewed(log, `${what}: passwords, keys, certificates`) });
  const redis = config.redis && { ...config.redis, ...told('redis') };
  const s3 = config.s3 && { ...config.s3, ...told('s3') };
  const list = config.membership && { ...config.membership.redis, ...told('membership') };
  const membership = config.membership && { ...config.membership, redis: list! };
  const of = { group: readGroup(config.group), peers, kvEvents, redis, s3, membership };
  const gauges = () => ({ 'renewals.refused': refusedRenewals() });
  const node = await openCacheNode({ ...config, ...of, clock: systemClock, log, failpoint, gauges });
  log.info({ socket: config.socketPath, arena: node.arenaPath, dataDir: config.dataDir }, 'the cache node serves');
  return {
    ready: { socketPath: config.socketPath, arenaPath: node.arenaPath },
    close: () => node.close(),
  };
});
