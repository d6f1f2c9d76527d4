import { chmodSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { type PeerTls, peersSchema, readPeerCredentials } from './peer.ts';
import { ownCertificate, renew } from './testing/index.ts';

const folder = mkdtempSync(join(tmpdir(), 'kvtier-peers-'));
afterAll(() => rmSync(folder, { recursive: true }));
const none = { encryption: 'none', secretFile: '/s' };
const tls = { encryption: 'tls', certFile: '/c', keyFile: '/k', caFile: '/a' };
const out = [{ host: '10.0.0.2', port: 7000 }];

it.each([
  [{ security: none }, true],
  [{ security: none, peers: [{ host: '127.0.0.1', port: 1 }], listen: { host: '::1', port: 0 } }, true],
  [{ security: none, peers: out }, false],
  [{ security: none, listen: { host: '0.0.0.0', port: 1 } }, false],
  [{ security: { ...none, trustedNetwork: true }, peers: out }, true],
  [{ security: tls, peers: out, listen: { host: '0.0.0.0', port: 1 } }, true],
  [{ security: tls, listen: { host: 'name', port: 1 } }, false],
  [{ peers: out }, false],
  [{ security: tls, colour: 1 }, false],
])('%j', (value, good) => {
  expect(peersSchema.safeParse(value).success).toBe(good);
});

const ignore = (): void => {};

it('reads a secret that nobody else can read', () => {
  const secretFile = join(folder, 'secret');
  const config = { encryption: 'none' as const, secretFile, trustedNetwork: false };
  expect(() => readPeerCredentials(config, ignore)).toThrow(/secret: cannot be used \(ENOENT/);
  writeFileSync(secretFile, 'x'.repeat(32), { mode: 0o600 });
  expect(readPeerCredentials(config, ignore)).toEqual({
    ...{ encryption: 'none', secret: Buffer.from('x'.repeat(32)), trustedNetwork: false },
  });
  chmodSync(secretFile, 0o644);
  expect(() => readPeerCredentials(config, ignore)).toThrow(/chmod o-rwx/);
  writeFileSync(secretFile, 'short');
  chmodSync(secretFile, 0o600);
  expect(() => readPeerCredentials(config, ignore)).toThrow(/at least 32 bytes/);
});

it('has certificates as the files hold them now, and says when that changes', async () => {
  for (const name of ['first', 'second']) ownCertificate(folder, name);
  const at = (name: string): string => join(folder, name);
  for (const kind of ['pem', 'key']) renew(folder, `first.${kind}`, `node.${kind}`);
  const files = { certFile: at('node.pem'), keyFile: at('node.key'), caFile: at('first.pem'), reloadMs: 5 };
  const read = readPeerCredentials({ encryption: 'tls', ...files }, ignore) as PeerTls;
  const pems = (name: string) => [readFileSync(at(`${name}.pem`)), readFileSync(at(`${name}.key`))];
  expect([read.cert, read.key, read.ca]).toEqual([...pems('first'), readFileSync(at('first.pem'))]);
  const renewed = new Promise<void>((resolve) => read.onRenewed(resolve));
  for (const kind of ['pem', 'key']) renew(folder, `second.${kind}`, `node.${kind}`);
  await renewed;
  expect([read.cert, read.key]).toEqual(pems('second'));
});
