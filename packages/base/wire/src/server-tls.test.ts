/** TLS of a gRPC server over real connections: who is let in, and files that change under it. */
import { chmodSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { credentials } from '@grpc/grpc-js';
import { ownCertificate, renew } from '@kvtier/config/testing';
import { afterAll, beforeAll, beforeEach, expect, it } from 'vitest';
import { HealthClient, type HealthServer, HealthService, ServingStatus } from './ext-proc.ts';
import { deadlineAfter, startGrpcServer, TlsServerCredentials } from './grpc.ts';

let folder: string;
const at = (name: string): string => join(folder, name);
const bytes = (name: string): Buffer => readFileSync(at(name));

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-tls-'));
  for (const name of ['first', 'second', 'client']) ownCertificate(folder, name);
});
afterAll(() => rmSync(folder, { recursive: true }));
let problems: (string | undefined)[];
beforeEach(() => {
  problems = [];
  for (const kind of ['key', 'pem']) use('first', kind);
});

const use = (name: string, kind: string): void => renew(folder, `${name}.${kind}`, `server.${kind}`);

const files = (clientCaFile: string | null = null) => ({
  certFile: at('server.pem'),
  keyFile: at('server.key'),
  clientCaFile,
});
const handlers: HealthServer = {
  check: (_, callback) => callback(null, { status: ServingStatus.SERVING }),
  watch: (call) => call.end(),
};

async function serve(tls: TlsServerCredentials) {
  const server = await startGrpcServer('127.0.0.1:0', (grpc) => grpc.addService(HealthService, handlers), {
    credentials: tls,
  });
  return {
    address: server.address,
    close: async () => {
      tls.close();
      await server.close(0);
    },
  };
}

/** Whether a new connection that trusts `authority`, and shows `own`, gets an answer. */
function reaches(address: string, authority: string, own?: string): Promise<boolean> {
  const pair = own === undefined ? [] : [bytes(`${own}.key`), bytes(`${own}.pem`)];
  const channel = credentials.createSsl(bytes(`${authority}.pem`), ...pair);
  const client = new HealthClient(address, channel, { 'grpc.use_local_subchannel_pool': 1 });
  return new Promise<boolean>((resolve) =>
    client.check({ service: '' }, { deadline: deadlineAfter(3_000) } as never, (error) => resolve(error === null)),
  ).finally(() => client.close());
}

const credentialsOf = (clientCaFile: string | null = null): TlsServerCredentials =>
  new TlsServerCredentials(files(clientCaFile), {
    place: 'tls',
    reloadMs: 60_000,
    onProblem: (why) => problems.push(why),
  });

it('a new pair serves the next connection, half a pair changes nothing', async () => {
  const tls = credentialsOf();
  const { address, close } = await serve(tls);
  expect(await reaches(address, 'first')).toBe(true);
  expect(await reaches(address, 'second')).toBe(false);
  use('second', 'pem');
  await tls.reload();
  expect(problems).toEqual([expect.stringMatching(/server\.key: not read again \(.*\); the one before stays in use$/)]);
  expect(await reaches(address, 'first')).toBe(true);
  use('second', 'key');
  await tls.reload();
  await tls.reload();
  expect(problems.slice(1)).toEqual([undefined]);
  expect(await reaches(address, 'first')).toBe(false);
  expect(await reaches(address, 'second')).toBe(true);
  rmSync(at('server.key'));
  await tls.reload();
  expect(problems.length).toBe(3);
  expect(await reaches(address, 'second')).toBe(true);
  await close();
});

it('the files are looked at again by themselves', async () => {
  let told = (): void => {};
  const changed = new Promise<void>((resolve) => (told = resolve));
  const tls = new TlsServerCredentials(files(), { place: 'tls', reloadMs: 5, onProblem: told });
  use('second', 'pem');
  await changed;
  tls.close();
});

it('with an authority for clients, only who shows its certificate is let in', async () => {
  const { address, close } = await serve(credentialsOf(at('client.pem')));
  expect(await reaches(address, 'first', 'client')).toBe(true);
  expect(await reaches(address, 'first', 'second')).toBe(false);
  expect(await reaches(address, 'first')).toBe(false);
  await close();
});

it('files that cannot be used are refused at start', () => {
  chmodSync(at('server.key'), 0o644);
  expect(credentialsOf).toThrow(
    /^tls\.keyFile: \/.*server\.key: cannot be used \(others may read it; chmod o-rwx it\)/,
  );
  chmodSync(at('server.key'), 0o640); // a secret that Kubernetes mounts for a group
  credentialsOf().close();
  use('second', 'key');
  expect(credentialsOf).toThrow(
    /^tls\.keyFile: \/.*server\.key: is not the key of the certificate of tls\.certFile \(\/.*server\.pem\); name two files of one pair$/,
  );
  expect(() => credentialsOf(at('none.pem'))).toThrow(/^tls\.clientCaFile: \/.*none\.pem: cannot be used \(ENOENT/);
});
