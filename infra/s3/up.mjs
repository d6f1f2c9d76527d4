/**
 * An S3 server by hand: node infra/s3/up.mjs [--port N]. Makes the bucket "kvtier", prints what the tier's configuration needs,
 * and lives until Ctrl-C, which leaves nothing.
 */
import { SetupError, script } from '../../scripts/lib/command.mjs';
import { s3Packages } from '../../scripts/lib/system.mjs';
import { importTypeScript } from '../../scripts/lib/typescript.mjs';
import { setup } from '../../scripts/setup.mjs';

await script(async (args) => {
  const port = args.length === 0 ? undefined : Number(args[1]);
  if (args.length > 0 && !(args.length === 2 && args[0] === '--port' && port >= 1 && port <= 65_535))
    throw new SetupError('node infra/s3/up.mjs [--port N], a port from 1 to 65535');
  await setup({ need: ['npm'], packages: s3Packages });
  const { S3Server, s3Credentials } = await importTypeScript('infra/s3/servers.ts');
  const { makeBucket } = await importTypeScript('packages/store/tiers/src/s3/testing/s3.ts');
  const server = await S3Server.start(port === undefined ? {} : { port });
  try {
    await makeBucket(server.url, 'kvtier');
    const config = { endpoint: server.url, bucket: 'kvtier', bytes: 2 ** 30, ...s3Credentials };
    process.stdout.write(`${JSON.stringify(config, null, 2)}\nrunning; Ctrl-C ends it\n`);
    const alive = setInterval(() => {}, 1 << 30);
    await new Promise((resolve) => {
      for (const name of ['SIGINT', 'SIGTERM', 'SIGHUP']) process.once(name, resolve);
    });
    clearInterval(alive);
  } finally {
    await server.stop();
  }
  return 0;
});
