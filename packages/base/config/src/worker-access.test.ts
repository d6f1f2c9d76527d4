/** The files by which coordinator and workers know each other: read, or refused with one line. */
import { chmodSync, mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { readWorkerAccess, readWorkerTls, workerAccessSchema } from './worker-access.ts';

let dir: string;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-access-'));
});
afterEach(() => rmSync(dir, { recursive: true, force: true }));

const file = (name: string, text: string, mode = 0o600): string => {
  const path = join(dir, name);
  writeFileSync(path, text);
  chmodSync(path, mode);
  return path;
};
const access = (part: object) => readWorkerAccess(workerAccessSchema.parse(part));

it('nothing is needed where nothing is beyond loopback', () => {
  const none = { ca: undefined, cert: undefined, key: undefined, serverName: undefined, token: undefined };
  const untrusted = { ...none, trustedNetwork: false };
  expect(access({})).toEqual(untrusted);
  expect(access({ trustedNetwork: true })).toEqual({ ...none, trustedNetwork: true });
  expect(() => workerAccessSchema.parse({ other: 1 })).toThrow();
});

it('files are read whole, a token without its end of line', () => {
  const [ca, cert, key] = [file('ca', 'A', 0o644), file('cert', 'C', 0o644), file('key', 'K')];
  const tokenFile = file('token', 'secret\n');
  const read = access({ caFile: ca, certFile: cert, keyFile: key, serverName: 'workers', tokenFile });
  expect(read).toEqual({
    ca: Buffer.from('A'),
    cert: Buffer.from('C'),
    key: Buffer.from('K'),
    serverName: 'workers',
    token: 'secret',
    trustedNetwork: false,
  });
  expect(readWorkerTls({ certFile: cert, keyFile: key, clientCaFile: ca })).toEqual({
    ca: Buffer.from('A'),
    cert: Buffer.from('C'),
    key: Buffer.from('K'),
  });
});

it('secrets that Kubernetes mounts for a group are taken', () => {
  const certFile = file('cert', 'C', 0o444);
  const read = access({ certFile, keyFile: file('key', 'K', 0o440), tokenFile: file('token', 'secret', 0o440) });
  expect([read.key, read.token]).toEqual([Buffer.from('K'), 'secret']);
});

it.each<[string, () => object, string]>([
  ['a certificate without its key', () => ({ certFile: file('cert', 'C') }), 'give certFile and keyFile'],
  [
    'a key that others may read',
    () => ({ certFile: file('c', 'C'), keyFile: file('k', 'K', 0o644) }),
    'others may read',
  ],
  ['a token that others may read', () => ({ tokenFile: file('t', 'x', 0o604) }), 'others may read'],
  ['an empty token', () => ({ tokenFile: file('t', '\n') }), 'is no bearer token'],
  ['a token of two lines', () => ({ tokenFile: file('t', 'a\nb') }), 'is no bearer token'],
  ['a file that is not there', () => ({ caFile: join(dir, 'none') }), 'cannot be used'],
])('%s is refused', (_, part, why) => {
  expect(() => access(part())).toThrow(
    expect.objectContaining({ code: 'CONFIG', message: expect.stringContaining(why) }),
  );
});
