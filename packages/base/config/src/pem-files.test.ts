/** Files of certificates and keys that are not what they are named for: each is one line, by the key that names the file. */
import { execFileSync } from 'node:child_process';
import { chmodSync, mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterAll, expect, it } from 'vitest';
import { pemFilesOf, pemsIn } from './pem-files.ts';
import { RenewedFiles } from './renewed-files.ts';
import { ownCertificate } from './testing/certificates.ts';

const dir = mkdtempSync(join(tmpdir(), 'kvtier-pems-'));
afterAll(() => rmSync(dir, { recursive: true, force: true }));
const at = (name: string): string => join(dir, name);
for (const name of ['own', 'other']) ownCertificate(dir, name);
const file = (name: string, content: string | Buffer): string => {
  writeFileSync(at(name), content, { mode: 0o600 });
  return at(name);
};
const pem = readFileSync(at('own.pem'), 'utf8');
const key = readFileSync(at('own.key'), 'utf8');

function read(files: Parameters<typeof pemFilesOf>[1]): void {
  const named = pemFilesOf('tls', files);
  new RenewedFiles({
    files: named,
    make: (bytes) => pemsIn(named, bytes),
    file: 'a readable PEM file',
    content: 'a certificate and its key (PEM)',
    ...{ reloadMs: 60_000, onProblem: () => {} },
  }).close();
}

const pair = { certFile: at('own.pem'), keyFile: at('own.key') };
const locked = at('locked.key');
execFileSync('openssl', ['pkey', '-in', at('own.key'), '-aes128', '-passout', 'pass:x', '-out', locked]);
chmodSync(locked, 0o600);
const damaged = (text: string): string => text.replace(/\n[^-\n]{20}/, '\nAAAAAAAAAAAAAAAAAAAA');

it.each<[string, object, string]>([
  [
    'a certificate as the key',
    { keyFile: file('cert-600.pem', pem) },
    'keyFile: PATH: holds a certificate, not a private key; name the private key (PEM), and the certificate where that belongs',
  ],
  [
    'a certificate that all may read as the key',
    { keyFile: at('own.pem') },
    'keyFile: PATH: holds a certificate, not a private key; name the private key (PEM), and the certificate where that belongs',
  ],
  [
    'a key as the certificate',
    { certFile: at('own.key') },
    'certFile: PATH: holds a private key, not a certificate; name the certificate (PEM), and its key where the key belongs',
  ],
  [
    'a key as the authority',
    { clientCaFile: at('own.key') },
    'clientCaFile: PATH: holds a private key, not certificates of an authority; name a file of certificates, each between BEGIN CERTIFICATE and END CERTIFICATE (PEM)',
  ],
  [
    'another key',
    { keyFile: at('other.key') },
    'keyFile: PATH: is not the key of the certificate of tls.certFile (OWN); name two files of one pair',
  ],
  [
    'no PEM',
    { certFile: file('der', Buffer.from([0x30, 0x82, 1])) },
    'certFile: PATH: holds no PEM, not a certificate; name the certificate (PEM), and its key where the key belongs',
  ],
  [
    'an empty file',
    { keyFile: file('empty', '') },
    'keyFile: PATH: holds nothing, not a private key; name the private key (PEM), and the certificate where that belongs',
  ],
  [
    'a key with a passphrase',
    { keyFile: locked },
    'keyFile: PATH: holds a private key with a passphrase; name one without (openssl pkey -in OLD -out NEW)',
  ],
  [
    'PEM of another kind',
    { keyFile: file('public', '-----BEGIN PUBLIC KEY-----\n') },
    'keyFile: PATH: holds PEM of another kind (PUBLIC KEY), not a private key; name the private key (PEM), and the certificate where that belongs',
  ],
  [
    'a file that is not there',
    { clientCaFile: at('none') },
    "clientCaFile: PATH: cannot be used (ENOENT: no such file or directory, open 'PATH'); name a readable PEM file",
  ],
])('%s', (_, part, line) => {
  const path = Object.values(part)[0] as string;
  const message = `tls.${line.replaceAll('PATH', path).replace('OWN', at('own.pem'))}`;
  expect(() => read({ ...pair, ...part })).toThrow(expect.objectContaining({ code: 'CONFIG', message }));
});

it('a key that all may read is refused, and what holds both', () => {
  for (const text of [key, `${pem}${key}`]) {
    const open = file('open.key', text);
    chmodSync(open, 0o644);
    expect(() => read({ ...pair, keyFile: open })).toThrow(`tls.keyFile: ${open}: cannot be used (others may read it`);
  }
});

it.each([
  ['certificate', { certFile: file('damaged.pem', damaged(pem)) }, 'certFile'],
  ['private key', { keyFile: file('damaged.key', damaged(key)) }, 'keyFile'],
])('a damaged %s is said to be one', (what, part, option) => {
  expect(() => read({ ...pair, ...part })).toThrow(new RegExp(`^tls.${option}: .*: holds a damaged ${what} \\(`));
});

it('a pair, an authority, both in one file, words between them: taken', () => {
  const whole = file('whole.pem', `Bag Attributes\n${key}\nsubject=CN=own\n${pem}`);
  read({ ...pair, clientCaFile: at('other.pem') });
  read({ certFile: whole, keyFile: whole });
  read({ caFile: at('other.pem') });
});
