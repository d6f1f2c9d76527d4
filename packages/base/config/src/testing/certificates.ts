/** Certificates for tests, made by the openssl program in a folder of the caller's, and renewed as Kubernetes renews mounted secrets. */
import { execFileSync } from 'node:child_process';
import { chmodSync, copyFileSync, renameSync } from 'node:fs';
import { join } from 'node:path';

/** NAME.pem and NAME.key for 127.0.0.1: a certificate of its own, which is its own authority. */
export function ownCertificate(folder: string, name: string): void {
  const at = (kind: string): string => join(folder, `${name}.${kind}`);
  const kind = ['req', '-x509', '-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:prime256v1', '-nodes', '-days', '2'];
  const names = ['-subj', `/CN=${name}`, '-addext', 'subjectAltName=IP:127.0.0.1'];
  execFileSync('openssl', [...kind, '-keyout', at('key'), '-out', at('pem'), ...names], { stdio: 'ignore' });
}

/** What is in `from` lies under the name `to` from now on, as another file: none of its readers sees half of it. */
export function renew(folder: string, from: string, to: string): void {
  const next = join(folder, `next-${to}`);
  copyFileSync(join(folder, from), next);
  chmodSync(next, 0o600);
  renameSync(next, join(folder, to));
}
