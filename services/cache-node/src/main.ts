/** The cache node as a process: configuration in, a node that runs until it is told to stop. */
import { cacheNodeSchema, readServiceConfig } from '@kvtier/config';
import { cacheNodeChecks, openCacheNode, optionsOf } from '@kvtier/node';
import { runService, type ServiceArguments, serviceLogger } from '@kvtier/telemetry';

const read = ({ configFile }: ServiceArguments) => readServiceConfig(cacheNodeSchema, configFile);

runService(
  'cache-node',
  async (given) => {
    const config = read(given);
    const log = serviceLogger('cache-node', config.logLevel);
    const node = await openCacheNode(optionsOf(config, log));
    log.info({ socket: config.socketPath, arena: node.arenaPath, dataDir: config.dataDir }, 'the cache node serves');
    return {
      ready: { socketPath: config.socketPath, arenaPath: node.arenaPath },
      close: () => node.close(),
    };
  },
  (given) => cacheNodeChecks(read(given)),
);
