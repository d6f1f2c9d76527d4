/** S3 tiers over the arena of a TestBench, small and quick, and what tests do to a bucket behind their backs. */
import type { S3Client } from '@aws-sdk/client-s3';
import { s3Credentials } from '../../../../../../infra/s3/servers.ts';
import { ArenaMemory } from '../../arena/arena-memory.ts';
import { silentLog, type TestBench } from '../../kit/testing/objects.ts';
import type { S3Settings, S3TierOptions } from '../options.ts';
import { S3Tier } from '../s3-tier.ts';

export const testArenaBytes = 32 << 20;

export function openS3(
  bench: TestBench,
  settings: Partial<S3Settings> & Pick<S3Settings, 'endpoint' | 'bucket'>,
  options: Partial<S3TierOptions> = {},
): Promise<S3Tier> {
  return S3Tier.open({
    ...{
      bytes: 4 << 20,
      packBytes: 96 << 10,
      flushMs: 2,
      timeLimitMs: 10_000,
      idleLimitMs: 5_000,
      refreshMs: 3_600_000,
    },
    ...s3Credentials,
    ...settings,
    arena: bench.arena,
    memory: new ArenaMemory(bench.arena, testArenaBytes),
    slots: bench.tier,
    log: silentLog,
    ...options,
  });
}

/** A bucket, as somebody else sees it. */
export class Bucket {
  readonly name: string;
  readonly #client: S3Client;
  readonly #sdk: typeof import('@aws-sdk/client-s3');

  static async make(endpoint: string, name: string, acl?: 'public-read-write'): Promise<Bucket> {
    process.env.AWS_SDK_JS_NODE_VERSION_SUPPORT_WARNING_DISABLED = 'true';
    const sdk = await import('@aws-sdk/client-s3');
    const client = new sdk.S3Client({
      ...{ endpoint, region: 'us-east-1', forcePathStyle: true, credentials: s3Credentials },
      ...{ requestChecksumCalculation: 'WHEN_REQUIRED', responseChecksumValidation: 'WHEN_REQUIRED' },
    });
    await client.send(new sdk.CreateBucketCommand({ Bucket: name, ...(acl && { ACL: acl }) }));
    return new Bucket(name, client, sdk);
  }

  private constructor(name: string, client: S3Client, sdk: typeof import('@aws-sdk/client-s3')) {
    this.name = name;
    this.#client = client;
    this.#sdk = sdk;
  }

  /** Sizes by key. */
  async list(): Promise<Map<string, number>> {
    const { Contents = [] } = await this.#client.send(new this.#sdk.ListObjectsV2Command({ Bucket: this.name }));
    return new Map(Contents.map(({ Key, Size }) => [Key!, Size!]));
  }

  async bytes(): Promise<number> {
    return [...(await this.list()).values()].reduce((sum, bytes) => sum + bytes, 0);
  }

  /** Keys of packs, in order. */
  async packs(): Promise<string[]> {
    return [...(await this.list()).keys()].filter((key) => key.includes('/packs/')).sort();
  }

  async get(key: string): Promise<Buffer> {
    const { Body } = await this.#client.send(new this.#sdk.GetObjectCommand({ Bucket: this.name, Key: key }));
    return Buffer.from(await Body!.transformToByteArray());
  }

  async put(key: string, body: Uint8Array): Promise<void> {
    await this.#client.send(new this.#sdk.PutObjectCommand({ Bucket: this.name, Key: key, Body: body }));
  }

  async delete(key: string): Promise<void> {
    await this.#client.send(new this.#sdk.DeleteObjectCommand({ Bucket: this.name, Key: key }));
  }

  /** Nobody may do so any more, by the bucket's policy, be it its owner: names of S3, as `s3:PutObject`. */
  async forbid(...actions: string[]): Promise<void> {
    const Resource = `arn:aws:s3:::${this.name}/*`;
    const Statement = [{ Effect: 'Deny', Principal: '*', Action: actions, Resource }];
    const Policy = JSON.stringify({ Version: '2012-10-17', Statement });
    await this.#client.send(new this.#sdk.PutBucketPolicyCommand({ Bucket: this.name, Policy }));
  }

  async allowAll(): Promise<void> {
    await this.#client.send(new this.#sdk.DeleteBucketPolicyCommand({ Bucket: this.name }));
  }

  close(): void {
    this.#client.destroy();
  }
}

export async function makeBucket(endpoint: string, name: string): Promise<void> {
  (await Bucket.make(endpoint, name)).close();
}
