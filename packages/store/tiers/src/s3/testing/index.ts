/** For tests: doubles, rigs and what else of this tier they look at. */
export { Discovery } from '../discovery.ts';
export type { HttpReply, HttpRequest, TryLimits } from '../http-connection.ts';
export { HttpPool } from '../http-pool.ts';
export { decodePackTable, packTableBytesOf } from '../pack-format.ts';
export { PackWriter } from '../pack-writer.ts';
export { loadSdk, S3Api } from '../s3-api.ts';
export { FakeBucket } from './fake-bucket.ts';
export { Bucket, openS3 } from './s3.ts';
export { S3Proxy } from './s3-proxy.ts';
