/** The S3 tier. */

export type { S3Settings, S3TierOptions } from './options.ts';
export { checkS3 } from './options.ts';
export { loadSdk } from './s3-api.ts';
export { S3Tier } from './s3-tier.ts';
