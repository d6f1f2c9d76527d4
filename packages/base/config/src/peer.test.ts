import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { peersSchema, readPeerCredentials } from './peer.ts';

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

it('reads a secret that nobody else can read', () => {
  const secretFile = join(folder, 'secret');
  const config = { encryption: 'none' as const, secretFile, trustedNetwork: false };
  expect(() => readPeerCredentials(config)).toThrow(/secret: cannot be used \(ENOENT/);
  writeFileSync(secretFile, 'x'.repeat(32), { mode: 0o600 });
  expect(readPeerCredentials(config)).toEqual({
    ...{ encryption: 'none', secret: Buffer.from('x'.repeat(32)), trustedNetwork: false },
  });
  chmodSync(secretFile, 0o644);
  expect(() => readPeerCredentials(config)).toThrow(/chmod 600/);
  writeFileSync(secretFile, 'short');
  chmodSync(secretFile, 0o600);
  expect(() => readPeerCredentials(config)).toThrow(/at least 32 bytes/);
});
