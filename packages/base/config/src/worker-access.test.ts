/** The files by which coordinator and workers know each other: read, renewed, or refused with one line. */
import { chmodSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, beforeAll, expect, it } from 'vitest';
import { ownCertificate, renew } from './testing/index.ts';
import { WorkerAccess, workerAccessSchema } from './worker-access.ts';

let dir: string;
beforeAll(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-access-'));
  for (const name of ['first', 'second']) ownCertificate(dir, name);
});
afterAll(() => rmSync(dir, { recursive: true }));

const at = (name: string): string => join(dir, name);
const file = (name: string, text: string, mode = 0o600): string => {
  writeFileSync(at(name), text);
  chmodSync(at(name), mode);
  return at(name);
};
const problems: (string | undefined)[] = [];
const access = (part: object): WorkerAccess =>
  new WorkerAccess(workerAccessSchema.parse({ reloadMs: 60_000, ...part }), (why) => problems.push(why));
const held = ({ ca, cert, key, serverName, token, trustedNetwork }: WorkerAccess) => ({
  ...{ ca, cert, key, serverName, token, trustedNetwork },
});
const pems = (name: string) => ({
  ca: readFileSync(at('first.pem')),
  cert: readFileSync(at(`${name}.pem`)),
  key: readFileSync(at(`${name}.key`)),
});
const ours = () => ({ certFile: at('our.pem'), keyFile: at('our.key'), caFile: at('first.pem') });
const use = (name: string, ...kinds: string[]): void => {
  for (const kind of kinds) renew(dir, `${name}.${kind}`, `our.${kind}`);
};

it('nothing is needed where nothing is beyond loopback', () => {
  const none = { ca: undefined, cert: undefined, key: undefined, serverName: undefined, token: undefined };
  expect(held(access({}))).toEqual({ ...none, trustedNetwork: false });
  expect(held(access({ trustedNetwork: true }))).toEqual({ ...none, trustedNetwork: true });
  expect([access({}), access({ tokenInClear: true })].map(({ tokenInClear }) => tokenInClear)).toEqual([false, true]);
  expect(() => workerAccessSchema.parse({ other: 1 })).toThrow();
});

it('files are read whole, a token without its end of line, and what is new takes their place', async () => {
  use('first', 'pem', 'key');
  const read = access({ ...ours(), serverName: 'workers', tokenFile: file('token', 'secret\n') });
  expect(held(read)).toEqual({ ...pems('first'), serverName: 'workers', token: 'secret', trustedNetwork: false });
  // Half a pair is none yet.
  use('second', 'pem');
  file('token', 'a\nb');
  await read.reload();
  expect(problems.splice(0).toSorted()).toEqual([
    expect.stringMatching(/our\.key: not read again \(.*\); the one before stays in use$/),
    expect.stringMatching(/token: not read again \(is no bearer token\); the one before stays in use$/),
  ]);
  expect(held(read)).toMatchObject({ ...pems('first'), token: 'secret' });
  use('second', 'key');
  file('token', 'other');
  await read.reload();
  expect(problems.splice(0)).toEqual([undefined, undefined]);
  expect(held(read)).toMatchObject({ ...pems('second'), token: 'other' });
  read.close();
});

it('secrets that Kubernetes mounts for a group are taken', () => {
  use('first', 'pem', 'key');
  chmodSync(at('our.key'), 0o440);
  const read = access({ ...ours(), tokenFile: file('group-token', 'secret', 0o440) });
  expect([read.key, read.token]).toEqual([pems('first').key, 'secret']);
  read.close();
});

const open = (): object => {
  use('first', 'pem', 'key');
  chmodSync(at('our.key'), 0o604);
  return ours();
};
const mixed = (): object => {
  use('first', 'pem');
  use('second', 'key');
  return ours();
};
it.each<[string, () => object, string]>([
  ['a certificate without its key', () => ({ certFile: at('first.pem') }), 'give certFile and keyFile'],
  ['a key that others may read', open, 'others may read it; chmod o-rwx it'],
  ['a key of another certificate', mixed, 'is not the key of the certificate of access.certFile'],
  ['a token that others may read', () => ({ tokenFile: file('t', 'x', 0o604) }), 'others may read'],
  ['an empty token', () => ({ tokenFile: file('t', '\n') }), 'is no bearer token'],
  ['a token of two lines', () => ({ tokenFile: file('t', 'a\nb') }), 'is no bearer token'],
  ['a file that is not there', () => ({ caFile: join(dir, 'none') }), 'cannot be used'],
])('%s is refused', (_, part, why) => {
  expect(() => access(part())).toThrow(
    expect.objectContaining({ code: 'CONFIG', message: expect.stringContaining(why) }),
  );
});
