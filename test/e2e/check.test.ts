/** `--check` of each service's program: what a start would refuse is said and nothing is started, bound or made. */
import { spawnSync } from 'node:child_process';
import { existsSync, mkdtempSync, readdirSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ownCertificate } from '@kvtier/config/testing';
import { afterAll, expect, it } from 'vitest';
import { bundled } from '../../scripts/lib/test-programs.mjs';

const names = ['coordinator', 'engine-worker', 'cache-node'] as const;
type Name = (typeof names)[number];
const files = await bundled(...names.map((name) => new URL(`../../services/${name}/src/main.ts`, import.meta.url)));
const programs = Object.fromEntries(names.map((name, at) => [name, files[at]!])) as Record<Name, string>;

const dir = mkdtempSync(join(tmpdir(), 'kvtier-check-'));
afterAll(() => rmSync(dir, { recursive: true, force: true }));
const at = (name: string): string => join(dir, name);
ownCertificate(dir, 'own');
ownCertificate(dir, 'other');
writeFileSync(at('cert-as-key'), readFileSync(at('own.pem')), { mode: 0o600 });
writeFileSync(at('keys'), 'a-key-of-sixteen-characters\n', { mode: 0o600 });
const model = new URL('../../models/demo/model', import.meta.url).pathname;

const tls = { certFile: at('own.pem'), keyFile: at('own.key') };
const sound: Record<Name, object> = {
  coordinator: { port: 8443, engine: 'unix:/nowhere/engine.sock', tls, apiKeysFile: at('keys') },
  'engine-worker': {
    ...{ modelDir: model, servedName: 'demo', listen: `unix:${at('engine.sock')}`, cacheNodeSocket: null },
  },
  'cache-node': {
    ...{
      socketPath: at('run/node.sock'),
      dataDir: at('data/node'),
      arena: { bytes: 2 ** 20 },
      disk: { bytes: 2 ** 26 },
    },
    redis: { servers: ['rediss://127.0.0.1:1'], bytes: 2 ** 26, tls: { caFile: at('own.pem') } },
  },
};

function check(name: Name, parts: object): { status: number | null; out: string; err: string; file: string } {
  const file = at('config.json');
  writeFileSync(file, JSON.stringify({ ...sound[name], ...parts }));
  const before = readdirSync(dir);
  const run = spawnSync(process.execPath, [programs[name], '--check', '--config', file], { encoding: 'utf8' });
  expect(readdirSync(dir)).toEqual(before);
  return { status: run.status, out: run.stdout, err: run.stderr.replaceAll(dir, 'DIR'), file };
}

it.each(names)('%s: sound', (name) => {
  const { file, ...said } = check(name, {});
  expect(said).toEqual({ status: 0, out: `configuration is valid: ${file}\n`, err: '' });
});

const mended = '; correct it and start again';
it.each<[string, Name, object, number, (string | RegExp)[]]>([
  [
    'a key that nobody knows',
    'coordinator',
    { prot: 1 },
    78,
    ['CONFIG: DIR/config.json: top level: unknown key "prot"; did you mean "port"?'],
  ],
  [
    'what cannot stand together',
    'coordinator',
    { host: '0.0.0.0', tls: null },
    78,
    [
      `CONFIG: DIR/config.json: tls: 0.0.0.0 is not loopback: name certFile and keyFile, or say "trustedNetwork": true${mended}`,
    ],
  ],
  [
    'a pod without a scheme',
    'coordinator',
    {
      engine: undefined,
      discovery: { kind: 'static', workers: [{ name: 'a', kind: 'openai', address: '10.0.0.1:8000' }] },
    },
    78,
    [`CONFIG: DIR/config.json: discovery.workers.0.address: write http://HOST:PORT or https://HOST:PORT${mended}`],
  ],
  [
    'every file that cannot be used',
    'coordinator',
    {
      tls: { ...tls, keyFile: at('cert-as-key') },
      adminKeysFile: at('none'),
      operations: { tls: { ...tls, keyFile: at('other.key') } },
    },
    1,
    [
      'CONFIG: tls.keyFile: DIR/cert-as-key: holds a certificate, not a private key; name the private key (PEM), and the certificate where that belongs',
      "CONFIG: adminKeysFile: DIR/none: cannot be used (ENOENT: no such file or directory, stat 'DIR/none'); name a readable file of keys, one a line",
      'CONFIG: operations.tls.keyFile: DIR/other.key: is not the key of the certificate of operations.tls.certFile (DIR/own.pem); name two files of one pair',
    ],
  ],
  [
    'a tokenizer that is not there',
    'coordinator',
    { tokenizers: { m: at('none') } },
    1,
    [
      "CONFIG: tokenizers.m: DIR/none/tokenizer.json cannot be read (ENOENT); name a folder with that model's tokenizer.json",
    ],
  ],
  [
    'a number out of bounds',
    'engine-worker',
    { blockTokens: 0 },
    78,
    [`CONFIG: DIR/config.json: blockTokens: write 1 or more${mended}`],
  ],
  [
    'no model, no folder of the socket',
    'engine-worker',
    { modelDir: at('none'), listen: `unix:${at('nowhere/s')}` },
    1,
    [
      'IO: listen: unix:DIR/nowhere/s: folder DIR/nowhere does not exist; make it, or name another',
      /^engine-worker: MODEL: DIR\/none\/config\.json: no such file; /,
    ],
  ],
  [
    'a unit where bytes belong',
    'cache-node',
    { arena: { bytes: '1GiB' } },
    78,
    [`CONFIG: DIR/config.json: arena.bytes: write a number of bytes, without a unit${mended}`],
  ],
  [
    'no room, no folder, no authority',
    'cache-node',
    {
      arena: { bytes: 2 ** 50 },
      dataDir: at('keys/data'),
      redis: { servers: ['rediss://127.0.0.1:1'], bytes: 2 ** 26, tls: { caFile: at('own.key') } },
      s3: { bucket: 'kvb', bytes: 2 ** 30, caFile: at('none') },
    },
    1,
    [
      'SETUP: dataDir: DIR/keys/data cannot be made or written (DIR/keys is no folder); choose a folder that you may write to',
      /^cache-node: CAPACITY: arena\.bytes: 1125899906842624 bytes do not fit \/dev\/shm \(\d+ free\); enlarge/,
      'CONFIG: redis.tls.caFile: DIR/own.key: holds a private key, not certificates of an authority; name a file of certificates, each between BEGIN CERTIFICATE and END CERTIFICATE (PEM)',
      "CONFIG: s3.caFile: DIR/none: cannot be used (ENOENT: no such file or directory, open 'DIR/none'); name a readable PEM file",
    ],
  ],
])('%s (%s)', (_, name, parts, status, lines) => {
  const { status: code, out, err } = check(name, parts);
  expect({ status: code, out, err: err.trimEnd().split('\n') }).toEqual({
    status,
    out: '',
    err: lines.map((line) => (typeof line === 'string' ? `${name}: ${line}` : expect.stringMatching(line))),
  });
});

it.each<[Name, object, string]>([
  [
    'coordinator',
    { tls: { certFile: at('own.key'), keyFile: at('own.key') } },
    'CONFIG: tls.certFile: DIR/own.key: holds a private key, not a certificate; name the certificate (PEM), and its key where the key belongs',
  ],
  [
    'cache-node',
    { s3: { bucket: 'kvb', bytes: 2 ** 30, caFile: at('own.key') }, redis: null },
    'CONFIG: s3.caFile: DIR/own.key: holds a private key, not certificates of an authority; name a file of certificates, each between BEGIN CERTIFICATE and END CERTIFICATE (PEM)',
  ],
])('%s: a start says the same', (name, parts, line) => {
  expect(check(name, parts)).toMatchObject({ status: 1, err: `${name}: ${line}\n` });
  const args = [programs[name], '--config', at('config.json')];
  const { status, stderr } = spawnSync(process.execPath, args, { encoding: 'utf8', timeout: 30_000 });
  const said = stderr.split('\n').filter((text) => text.startsWith(`${name}: `));
  expect([status, ...said.map((text) => text.replaceAll(dir, 'DIR'))]).toEqual([1, `${name}: ${line}`]);
  rmSync(at('data'), { recursive: true, force: true });
});

it('of the environment, too', () => {
  const env = { ...process.env, KVTIER_CONFIG: JSON.stringify(sound.coordinator) };
  const run = spawnSync(process.execPath, [programs.coordinator, '--check'], { encoding: 'utf8', env });
  expect([run.status, run.stdout]).toEqual([0, 'configuration is valid: KVTIER_CONFIG\n']);
  expect(existsSync(at('data'))).toBe(false);
});
