import { chmodSync, mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { type PeerSecret, type PeerTls, peersSchema, readPeerCredentials } from './peer.ts';
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
  const config = { encryption: 'none' as const, secretFile, trustedNetwork: false, reloadMs: 60_000 };
  expect(() => readPeerCredentials(config, ignore)).toThrow(
    /^peers\.security\.secretFile: \/.*secret: cannot be used \(ENOENT/,
  );
  writeFileSync(secretFile, 'x'.repeat(32), { mode: 0o600 });
  expect(readPeerCredentials(config, ignore)).toEqual({
    ...{ encryption: 'none', trustedNetwork: false },
    secrets: [Buffer.from('x'.repeat(32)), Buffer.from(`${'x'.repeat(32)}\n`)],
  });
  chmodSync(secretFile, 0o644);
  expect(() => readPeerCredentials(config, ignore)).toThrow(/chmod o-rwx/);
  writeFileSync(secretFile, 'short');
  chmodSync(secretFile, 0o600);
  expect(() => readPeerCredentials(config, ignore)).toThrow(/at least 32 bytes; name another file, made so: openssl/);
});

it('takes up a renewed secret; one that is none, or that others may read, leaves the one before and is told once', async () => {
  const secretFile = join(folder, 'renewed');
  const write = (text: string, mode = 0o600): void => {
    writeFileSync(`${secretFile}.new`, text);
    chmodSync(`${secretFile}.new`, mode);
    renameSync(`${secretFile}.new`, secretFile);
  };
  const [old, fresh] = ['o'.repeat(40), 'f'.repeat(40)];
  write(`${old}\n`);
  const told: (string | undefined)[] = [];
  let hear = (): void => {};
  const next = (): Promise<void> => new Promise((resolve) => (hear = resolve));
  const config = { encryption: 'none' as const, secretFile, trustedNetwork: false, reloadMs: 5 };
  const read = readPeerCredentials(config, (why) => {
    told.push(why);
    hear();
  }) as PeerSecret;
  const held = (): string[] => read.secrets.map(String);
  expect(held()).toEqual([`${old}\n`, old]);
  for (const [text, mode, why] of [
    ['short', 0o600, /renewed: not read again \(a secret has at least 32 bytes\); the one before stays in use$/],
    [
      `${fresh}\n`,
      0o644,
      /renewed: not read again \(others may read it; chmod o-rwx it\); the one before stays in use$/,
    ],
  ] as const) {
    const bad = next();
    write(text, mode);
    await bad;
    expect([told.length, told.at(-1), held()[1]]).toEqual([1, expect.stringMatching(why), old]);
    told.length = 0;
  }
  const good = next();
  write(`${fresh}\n${old}\n`);
  await good;
  expect([told, held()]).toEqual([[undefined], [`${fresh}\n`, fresh, `${old}\n`, old]]);
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
