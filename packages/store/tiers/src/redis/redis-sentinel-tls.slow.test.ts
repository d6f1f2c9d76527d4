/** Sentinels with TLS that know their master by its name: so does its certificate, and no address is in it. */
import { execFileSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { RedisServer, until } from '../../../../../infra/redis/servers.ts';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import { openTier } from './testing/redis.ts';

const folder = mkdtempSync(join(tmpdir(), 'kvtier-sentinel-tls-'));
const [keyFile, certFile] = [join(folder, 'key.pem'), join(folder, 'cert.pem')];
const servers: RedisServer[] = [];
afterAll(async () => {
  await Promise.all(servers.map((server) => server.stop()));
  rmSync(folder, { recursive: true });
});

it('values come by the name that the certificate has', async () => {
  const kind = ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days', '2'];
  const names = ['-subj', '/CN=localhost', '-addext', 'subjectAltName=DNS:localhost'];
  execFileSync('openssl', [...kind, '-keyout', keyFile, '-out', certFile, ...names], { stdio: 'ignore' });
  const tls = { keyFile, certFile };
  const master = await RedisServer.start({ tls });
  servers.push(master);
  const config = [
    ...['sentinel resolve-hostnames yes', 'sentinel announce-hostnames yes'],
    `sentinel monitor kvtier localhost ${master.port} 1`,
  ];
  const sentinel = await RedisServer.start({ tls, config }, 'redis-sentinel');
  servers.push(sentinel);
  const masterHost = async (): Promise<string> =>
    (await sentinel.cli('sentinel', 'get-master-addr-by-name', 'kvtier')).split('\n')[0]!;
  await until(async () => (await masterHost()) === 'localhost', 'the name of the master');

  const bench = new TestBench();
  const [space, chain] = [namespaceNamed('one'), [hashNamed('a'), hashNamed('b')]];
  const tier = await openTier(bench, {
    ...{ mode: 'sentinel', masterName: 'kvtier', servers: [`rediss://localhost:${sentinel.port}`] },
    tls: { caFile: certFile },
  });
  expect(await bench.write(tier, space, chain, 20_000)).toEqual(['stored', 'stored']);
  expect(await bench.read(tier, space, chain, 20_000)).toEqual(['ready', 'ready']);
  await tier.close();
  bench.dispose();
});
