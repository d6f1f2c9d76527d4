/**
 * Redis servers by hand: node infra/redis/up.mjs single|tls|cluster|sentinel. Prints what the tier's configuration
 * needs, and lives until Ctrl-C, which leaves nothing.
 */
import { SetupError, script } from '../../scripts/lib/command.mjs';
import { redisPackages } from '../../scripts/lib/system.mjs';
import { importTypeScript } from '../../scripts/lib/typescript.mjs';
import { setup } from '../../scripts/setup.mjs';

const kinds = ['single', 'tls', 'cluster', 'sentinel'];

await script(async ([kind]) => {
  if (!kinds.includes(kind)) throw new SetupError(`name what to start: ${kinds.join(', ')}`);
  await setup({ need: ['npm'], packages: redisPackages });
  const { RedisServer, startTls, startCluster, startSentinel, aclRules } =
    await importTypeScript('infra/redis/servers.ts');
  const starts = {
    single: async () => {
      const server = await RedisServer.start();
      return { urls: [server.url], stop: () => server.stop(), more: {} };
    },
    tls: async () => {
      const group = await startTls(aclRules('kvtier:'));
      return { ...group, more: { username: 'kvtier', password: 'secret', tls: { caFile: group.caFile } } };
    },
    cluster: async () => ({ ...(await startCluster()), more: { mode: 'cluster' } }),
    sentinel: async () => ({ ...(await startSentinel()), more: { mode: 'sentinel', masterName: 'kvtier' } }),
  };
  const { urls, more, stop } = await starts[kind]();
  process.stdout.write(`${JSON.stringify({ servers: urls, ...more }, null, 2)}\nrunning; Ctrl-C ends it\n`);
  const alive = setInterval(() => {}, 1 << 30);
  await new Promise((resolve) => {
    for (const name of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.once(name, resolve);
  });
  clearInterval(alive);
  await stop();
  return 0;
});
