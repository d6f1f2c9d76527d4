/** The S3 tier. */
export type { S3Settings, S3TierOptions } from './options.ts';
export { S3Tier } from './s3-tier.ts';
