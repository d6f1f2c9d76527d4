/** Certificates for tests and benches: an authority and one node, made by the openssl program in a folder of the caller's. */
import { execFileSync } from 'node:child_process';
import { readFileSync, writeFileSync } from 'node:fs';
import { join } from 'node:path';
import type { PeerSecurity } from '../../peer/control.ts';

/** A CA and a node certificate for `address` (an IP), in `dir`. */
export function makeCertificates(dir: string, address: string): PeerSecurity {
  const at = (name: string): string => join(dir, name);
  const openssl = (...args: readonly string[]): void => {
    execFileSync('openssl', args, { stdio: 'ignore' });
  };
  const newKey = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes'];
  const ca = ['-x509', ...newKey, '-days', '2', '-subj', '/CN=kvtier test CA'];
  openssl('req', ...ca, '-keyout', at('ca.key'), '-out', at('ca.pem'));
  openssl('req', ...newKey, '-subj', '/CN=kvtier node', '-keyout', at('node.key'), '-out', at('node.csr'));
  writeFileSync(at('node.ext'), `subjectAltName=IP:${address}\n`);
  const sign = [
    '-CA',
    at('ca.pem'),
    '-CAkey',
    at('ca.key'),
    '-CAcreateserial',
    '-days',
    '2',
    '-extfile',
    at('node.ext'),
  ];
  openssl('x509', '-req', '-in', at('node.csr'), ...sign, '-out', at('node.pem'));
  return certificatesIn(dir);
}

/** Those that `makeCertificates` left in `dir`. */
export function certificatesIn(dir: string): PeerSecurity {
  const [cert, key, authority] = ['node.pem', 'node.key', 'ca.pem'].map((name) => readFileSync(join(dir, name)));
  return { encryption: 'tls', cert: cert!, key: key!, ca: authority! };
}
