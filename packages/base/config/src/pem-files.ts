/**
 * Certificates, keys and authorities, as the configuration names their files. What is in the wrong file, or does not belong to the other one,
 * is told by the key of the configuration that names it: OpenSSL's own words ("no start line") name neither the file nor the slip.
 */
import { createPrivateKey, X509Certificate } from 'node:crypto';
import { createSecureContext } from 'node:tls';
import { FileProblem, type NamedFile } from './read-pem.ts';

export interface PemFile extends NamedFile {
  /** As `createSecureContext` names it. */
  readonly name: 'cert' | 'key' | 'ca';
}

type Place = Readonly<Record<'certFile' | 'keyFile' | 'caFile' | 'clientCaFile', string | null | undefined>>;

const names = { certFile: 'cert', keyFile: 'key', caFile: 'ca', clientCaFile: 'ca' } as const;

/** `key`: the configuration's. A certificate may be read by all: who names one as the key is told that it is one. */
export const pemFile = (name: PemFile['name'], key: string, path: string): PemFile =>
  name === 'key' ? { name, key, path, isSecret: true, isNoSecret: holdsNoKey } : { name, key, path, isSecret: false };

const holdsNoKey = (bytes: Buffer): boolean =>
  bytes.includes('CERTIFICATE-----') && !bytes.includes('PRIVATE KEY-----');

/** Those that are named, the certificate in front: of it is told what nothing else is known of. `place`: of the section, "tls". */
export const pemFilesOf = (place: string, files: Partial<Place>): readonly PemFile[] =>
  (Object.keys(names) as (keyof Place)[]).flatMap((option) => {
    const path = files[option];
    return path == null ? [] : [pemFile(names[option], `${place}.${option}`, path)];
  });

/** What TLS takes. @throws FileProblem, or what OpenSSL says of a pair that it does not take */
export function pemsIn(files: readonly PemFile[], bytes: readonly Buffer[]): Pems {
  const pems = Object.fromEntries(files.map(({ name }, at) => [name, bytes[at]!])) as Pems;
  for (const [at, { name }] of files.entries()) checkKind(at, name, bytes[at]!);
  const [cert, key] = [files.findIndex(({ name }) => name === 'cert'), files.findIndex(({ name }) => name === 'key')];
  if (cert !== -1 && key !== -1) checkPair(files, bytes, cert, key);
  createSecureContext(pems);
  return pems;
}
export type Pems = Partial<Record<PemFile['name'], Buffer>>;

const certificates = 'certificates, each between BEGIN CERTIFICATE and END CERTIFICATE (PEM)';
const remedies = {
  cert: 'the certificate (PEM), and its key where the key belongs',
  key: 'the private key (PEM), and the certificate where that belongs',
  ca: `a file of ${certificates}`,
} as const;

function checkKind(at: number, name: PemFile['name'], bytes: Buffer): void {
  const kinds = [...bytes.toString('latin1').matchAll(/-----BEGIN ([A-Z0-9 ]+)-----/g)].map(([, kind]) => kind!);
  const hasKey = kinds.some((kind) => kind.endsWith('PRIVATE KEY'));
  const hasCertificate = kinds.some((kind) => kind.endsWith('CERTIFICATE'));
  if (name === 'key') {
    if (!hasKey) throw new FileProblem(at, `holds ${whatElse(kinds, bytes)}, not a private key`, remedies.key);
    const isLocked = kinds.includes('ENCRYPTED PRIVATE KEY') || bytes.includes('Proc-Type: 4,ENCRYPTED');
    if (isLocked)
      throw new FileProblem(at, 'holds a private key with a passphrase', 'one without (openssl pkey -in OLD -out NEW)');
  } else if (!hasCertificate) {
    const what = name === 'cert' ? 'not a certificate' : 'not certificates of an authority';
    throw new FileProblem(at, `holds ${hasKey ? 'a private key' : whatElse(kinds, bytes)}, ${what}`, remedies[name]);
  }
  try {
    if (name === 'key') createPrivateKey(bytes);
    else new X509Certificate(bytes);
  } catch (error) {
    const what = name === 'key' ? 'private key' : 'certificate';
    throw new FileProblem(at, `holds a damaged ${what} (${(error as Error).message})`, 'it as its authority made it');
  }
}

function whatElse(kinds: readonly string[], bytes: Buffer): string {
  if (kinds.some((kind) => kind.endsWith('CERTIFICATE'))) return 'a certificate';
  if (kinds.length > 0) return `PEM of another kind (${kinds[0]})`;
  return bytes.length === 0 ? 'nothing' : 'no PEM';
}

function checkPair(files: readonly PemFile[], bytes: readonly Buffer[], cert: number, key: number): void {
  if (new X509Certificate(bytes[cert]!).checkPrivateKey(createPrivateKey(bytes[key]!))) return;
  const of = files[cert]!;
  throw new FileProblem(key, `is not the key of the certificate of ${of.key} (${of.path})`, 'two files of one pair');
}
