/** The S3 tier. What is believed of a server: `answers.ts`; whether it takes writes: `write-refusals.ts`; renewed keys: `secrets.ts`. */

export type { S3Settings, S3TierOptions } from './options.ts';
export { checkS3 } from './options.ts';
export { loadSdk } from './s3-api.ts';
export { S3Tier } from './s3-tier.ts';
