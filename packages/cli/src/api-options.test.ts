/** Where `kvtier up` listens, who is answered there, and what is refused before anything is started. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { coordinatorSchema } from '@kvtier/config';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { parseUp } from './options.ts';

let dir: string;
const file = (name: string): string => join(dir, name);
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-api-options-'));
  for (const name of ['crt', 'key', 'ca', 'keys', 'admin']) writeFileSync(file(name), '');
});
afterAll(() => rmSync(dir, { recursive: true }));

const place = (...args: string[]) => parseUp(args)!.apiServer;
const tls = (): string[] => ['--tls-cert', file('crt'), '--tls-key', file('key')];
const none = { tls: null, apiKeysFile: null, adminKeysFile: null, trustedNetwork: false };

it('is loopback, and any of its addresses needs nothing more', () => {
  expect(place()).toEqual({ host: '127.0.0.1', ...none });
  for (const host of ['::1', 'localhost', '127.0.0.2']) expect(place('--host', host)).toEqual({ host, ...none });
});

it('is what the coordinator’s configuration lets beyond it', () => {
  const files = { certFile: file('crt'), keyFile: file('key') };
  const withKeys = place('--host', '0.0.0.0', ...tls(), '--api-keys', file('keys'), '--admin-keys', file('admin'));
  expect(withKeys).toEqual({
    ...{ ...none, host: '0.0.0.0', tls: files },
    ...{ apiKeysFile: file('keys'), adminKeysFile: file('admin') },
  });
  const withClients = place('--host', '::', ...tls(), '--tls-client-ca', file('ca'));
  expect(withClients).toEqual({ ...none, host: '::', tls: { ...files, clientCaFile: file('ca') } });
  const trusted = place('--host', '10.0.0.1', '--trusted-network');
  expect(trusted).toEqual({ ...none, host: '10.0.0.1', trustedNetwork: true });
  for (const taken of [withKeys, withClients, trusted])
    expect(coordinatorSchema.safeParse({ ...taken, port: 0, engine: 'unix:/e' }).success).toBe(true);
});

it.each([
  [['--host', 'gpu-1'], '--host: "gpu-1" is not an IP address, or localhost'],
  [
    ['--host', '0.0.0.0'],
    '--host: 0.0.0.0 is not loopback; give --tls-cert and --tls-key, and --api-keys or --tls-client-ca, or say --trusted-network',
  ],
  [
    ['--host', '0.0.0.0', '--api-keys', 'KEYS'],
    '--host: 0.0.0.0 is not loopback; give --tls-cert and --tls-key, and --api-keys or --tls-client-ca, or say --trusted-network',
  ],
  [
    ['--host', '10.0.0.1', '--tls-cert', 'CERT', '--tls-key', 'CERT'],
    '--host: 10.0.0.1 is not loopback; give --api-keys or --tls-client-ca, or say --trusted-network',
  ],
  [['--tls-cert', 'CERT'], '--tls-cert: goes with --tls-key; give it, too'],
  [['--tls-key', 'CERT'], '--tls-key: goes with --tls-cert; give it, too'],
  [['--tls-client-ca', 'CERT'], '--tls-client-ca: goes with --tls-cert; give it, too'],
  [['--api-keys', '/nowhere'], /^--api-keys: cannot be read \(ENOENT.*'\/nowhere'\); name a readable file$/],
])('refuses %j in one line', (args, message) => {
  const named = args.map((each) => (each === 'CERT' ? file('crt') : each === 'KEYS' ? file('keys') : each));
  expect(() => parseUp(named)).toThrow(message);
});
