export { ownCertificate, renew } from './certificates.ts';
