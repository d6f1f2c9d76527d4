/** `kvtier up --check`: options, and what the services would be configured with, are looked at; nothing is made. */
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ownCertificate } from '@kvtier/config/testing';
import { afterAll, expect, it, vi } from 'vitest';
import { checkSystem } from './check.ts';
import { parseUp } from './options.ts';
import { startSystem } from './system.ts';

const dir = mkdtempSync(join(tmpdir(), 'kvtier-up-check-'));
afterAll(() => rmSync(dir, { recursive: true }));
const file = (name: string): string => join(dir, name);
ownCertificate(dir, 'own');
writeFileSync(file('cert-as-key'), readFileSync(file('own.pem')), { mode: 0o600 });
writeFileSync(file('keys'), 'a-key-of-sixteen-characters\n', { mode: 0o600 });
const redis = { servers: ['rediss://127.0.0.1:1'], bytes: 2 ** 26, tls: { caFile: file('own.key') } };
writeFileSync(file('node.json'), JSON.stringify({ redis }));

const sizes = ['--data-dir', file('data'), '--arena-bytes', '8m', '--disk-bytes', '64m'];
async function checked(...args: string[]): Promise<{ lines: string[]; code: number }> {
  const before = readdirSync(dir);
  const { lines, code } = await checkSystem(parseUp(['--check', ...sizes, ...args])!);
  expect([readdirSync(dir), existsSync('/tmp/kvtier-check')]).toEqual([before, false]);
  return { lines: lines.map((line) => line.replaceAll(dir, 'DIR')), code };
}

/** Of what was found, and not written: none but 0 and 1. */
async function problems(...args: string[]): Promise<string[]> {
  const { lines, code } = await checked(...args);
  expect(code).toBe(lines.length === 0 ? 0 : 1);
  return lines;
}

it('sound: several engines and nodes, TLS, keys; no folder is made', async () => {
  const tls = ['--tls-cert', file('own.pem'), '--tls-key', file('own.key'), '--api-keys', file('keys')];
  const many = [
    '--engines',
    '4',
    '--nodes',
    '2',
    '--arena-bytes',
    '16m',
    '--disk-bytes',
    '128m',
    '--model',
    'random:25m',
  ];
  expect(await problems('--host', '0.0.0.0', ...tls, ...many)).toEqual([]);
}, 60_000);

it('each problem is one line: options by their own names, what the services read by its key', async () => {
  const tls = ['--tls-cert', file('own.pem'), '--tls-key', file('cert-as-key')];
  const wrong = ['--model', file('none'), '--node-config', file('node.json')];
  expect(await problems(...tls, ...wrong)).toEqual([
    'kvtier: --tls-key: DIR/cert-as-key: holds a certificate, not a private key; name the private key (PEM), and the certificate where that belongs',
    'kvtier: --model DIR/none: no such folder; give a Hugging Face model folder, demo or random:25m',
    'cache-node: CONFIG: redis.tls.caFile: DIR/own.key: holds a private key, not certificates of an authority; name a file of certificates, each between BEGIN CERTIFICATE and END CERTIFICATE (PEM)',
  ]);
}, 60_000);

it('an arena that /dev/shm has no room for', async () => {
  expect(await problems('--arena-bytes', '4t')).toEqual([
    expect.stringMatching(/^kvtier: --arena-bytes: 4 TiB is more than \/dev\/shm has free/),
  ]);
}, 60_000);

it('a data folder that cannot be made is named as it was written', async () => {
  expect(await problems('--data-dir', file('keys/below'))).toEqual([
    'kvtier: DIR/keys/below: cannot be used as the data folder (DIR/keys is no folder); name another with --data-dir',
  ]);
}, 60_000);

it('a group that this user is not in, by a start, too; its own and those it is in are taken', async () => {
  const user = { getegid: 1_000, geteuid: 1_000, getgroups: [7] };
  for (const [name, is] of Object.entries(user)) vi.spyOn(process, name as 'getegid').mockReturnValue(is as number);
  try {
    const line = '--group: this user is not in group 33; add it (usermod -aG 33 USER) and log in again';
    expect(await problems('--group', '33')).toEqual([`kvtier: ${line}`]);
    const start = startSystem(
      parseUp([...sizes, '--port', '0', '--group', '33'])!,
      { onLine: () => {}, onEvent: () => {} },
      AbortSignal.abort(),
    );
    await expect(start).rejects.toThrow(line);
    expect(existsSync(file('data'))).toBe(false);
    expect([await problems('--group', '7'), await problems('--group', '1000')]).toEqual([[], []]);
  } finally {
    vi.restoreAllMocks();
  }
}, 60_000);

it('a configuration of the node that is longer than a variable may be', async () => {
  const quotas = Object.fromEntries(
    Array.from({ length: 3_000 }, (_, i) => [`a-tenant-of-some-name-${i}`, { arena: 1_000, disk: 5_000 }]),
  );
  writeFileSync(file('quotas.json'), JSON.stringify({ quotas }));
  expect(await problems('--node-config', file('quotas.json'))).toEqual([]);
  writeFileSync(file('quotas.json'), JSON.stringify({ quotas, redis }));
  expect(await problems('--node-config', file('quotas.json'))).toEqual([
    expect.stringMatching(/^cache-node: CONFIG: redis\.tls\.caFile: DIR\/own\.key: holds a private key/),
  ]);
}, 60_000);

it('what is written wrongly ends it with 78, as a start', async () => {
  expect(await checked('--engines', '2', '--kv-bytes', '1m')).toEqual({
    lines: ['kvtier: --kv-bytes: 1 MiB are too little for 2 engines; give them 2 MiB'],
    code: 78,
  });
  expect(await checked('--engines', '2', '--nodes', '2')).toEqual({
    lines: ['kvtier: --arena-bytes: 8 MiB are too little for 2 nodes; give them 16 MiB'],
    code: 78,
  });
  writeFileSync(file('quota.json'), JSON.stringify({ quotas: { a: { arena: 1 << 30 } } }));
  const written = ['--arena-bytes', '64m', '--node-config', file('quota.json')];
  expect(await checked(...written)).toMatchObject({ code: 78 });
  const twice = ['--arena-bytes', '16m', '--disk-bytes', '128m'];
  writeFileSync(file('member.json'), JSON.stringify({ membership: { redis: { servers: ['unix:/r'] }, name: 'a' } }));
  expect(await checked('--engines', '2', '--nodes', '2', '--node-config', file('member.json'), ...twice)).toEqual({
    lines: [
      'kvtier: --node-config: "membership" is of one node, and there would be 2; remove it, or ask for --nodes 1',
    ],
    code: 78,
  });
}, 60_000);
