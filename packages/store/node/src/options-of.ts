/** What a cache node is opened with, of what its process is configured with: keys, certificates and the group out of their files. */
import { type CacheNodeConfig, readGroup, readKvEventsCurve, readPeerCredentials } from '@kvtier/config';
import { failpointFromEnv } from '@kvtier/placement';
import { systemClock } from '@kvtier/runtime';
import {
  endProcess,
  endProcessAfter,
  type Logger,
  refusedFiles,
  refusedRenewals,
  tellRenewed,
} from '@kvtier/telemetry';
import type { CacheNodeOptions } from './node.ts';

/** As after SIGTERM: what is queued is written down by then. */
const closeMs = 7_000;

/** A supervisor (`kvtier up`) that other services keep waiting leaves a node 4.5 s for its end, and S3 may take 2 s of them. */
const supervisedDrainMs = 2_500;

/** A sound node is to be started in its place: in order, and with the exit code of a failure. */
function endAndFail(close: () => Promise<void>): void {
  endProcessAfter(1, closeMs, 'cache-node');
  void close().finally(() => endProcess(1));
}

/** @throws KvError CONFIG: a file that cannot be used */
export function optionsOf(config: CacheNodeConfig, log: Logger): CacheNodeOptions {
  const [peering, events, failpoint] = [config.peers, config.kvEvents, failpointFromEnv(process.env)];
  const security = peering && readPeerCredentials(peering.security, tellRenewed(log, 'peers: certificate or secret'));
  const curve = events && readKvEventsCurve(events, tellRenewed(log, 'KV events: keys'));
  const peers = peering && { ...peering, security: security! };
  const kvEvents = events && { ...events, curve };
  const told = (what: string, place = what) => ({
    place,
    onProblem: tellRenewed(log, `${what}: passwords, keys, certificates`),
  });
  const redis = config.redis && { ...config.redis, ...told('redis') };
  const s3 = config.s3 && { ...config.s3, ...told('s3') };
  const list = config.membership && { ...config.membership.redis, ...told('membership', 'membership.redis') };
  const membership = config.membership && { ...config.membership, redis: list! };
  const gauges = () => ({ 'renewals.refused': refusedRenewals(), 'renewals.refused_now': refusedFiles() });
  const read = { group: readGroup(config.group), peers, kvEvents, redis, s3, membership };
  const closeDrainMs = process.connected ? supervisedDrainMs : undefined;
  return { ...config, ...read, clock: systemClock, log, failpoint, gauges, closeDrainMs, onArenaGone: endAndFail };
}
