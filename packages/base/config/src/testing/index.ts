export { ownCertificate, renew } from './certificates.ts';
export { type KeyFacts, keyFacts } from './schema-facts.ts';
