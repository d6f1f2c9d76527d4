/**
 * The S3 tier's configuration, docs/operating.md ("S3"). What a schema can see is refused here; what only the files and the server
 * can tell, when the tier opens.
 */
import * as z from 'zod';
import { milliseconds } from './listener.ts';

export const s3Schema = z
  .strictObject({
    bucket: z
      .string()
      .regex(/^[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]$/, 'write the name of a bucket: 3 to 63 of a-z, 0-9, "." and "-"'),
    /** Budget of all nodes that share this bucket and this prefix. */
    bytes: z
      .number()
      .int()
      .min(1 << 20),
    endpoint: z
      .string()
      .regex(/^https?:\/\/[^/?#@]+\/?$/, 'write https://host:port')
      .optional(),
    region: z.string().min(1).default('us-east-1'),
    /** Begins every key. */
    prefix: z
      .string()
      .regex(/^([\w.-]+\/)*[\w.-]+\/?$/, 'use parts of letters, digits, "_", "." and "-", separated by "/"')
      .max(256)
      .default('kvtier/'),
    pathStyle: z.boolean().optional(),
    accessKeyId: z.string().min(1).optional(),
    secretAccessKey: z.string().min(1).optional(),
    secretAccessKeyFile: z.string().min(1).optional(),
    sessionToken: z.string().min(1).optional(),
    /** Key id, secret key and token together, in the format of Amazon's shared credentials file. */
    credentialsFile: z.string().min(1).optional(),
    /** Of `credentialsFile`. */
    profile: z
      .string()
      .regex(/^[\w.@-]{1,128}$/, 'write the name of a profile: letters, digits, "_", ".", "@" and "-"')
      .optional(),
    caFile: z.string().min(1).optional(),
    /** How often these files are looked at for new ones. */
    reloadMs: milliseconds.default(10_000),
    packBytes: z
      .number()
      .int()
      .min(4096)
      .max(2 ** 30)
      .default(33 << 20),
    ttlSeconds: z.number().int().min(1).optional(),
    connections: z.number().int().min(1).max(256).default(16),
    timeLimitMs: z.number().int().min(100).max(600_000).default(15_000),
    idleLimitMs: z.number().int().min(50).max(60_000).default(5_000),
    flushMs: z.number().int().min(0).max(10_000).default(100),
    refreshMs: z.number().int().min(100).max(3_600_000).default(10_000),
    /** Blocks that are listed, about 180 bytes of heap each; a Map in which entries come and go holds few more. */
    maxBlocks: z
      .number()
      .int()
      .min(1)
      .max(8_000_000)
      .default(4 << 20),
  })
  .refine(({ bytes, packBytes }) => bytes >= packBytes + 4096, {
    path: ['bytes'],
    message: 'holds not one pack; raise bytes or lower packBytes',
  })
  .refine(({ secretAccessKey, secretAccessKeyFile }) => !secretAccessKey || !secretAccessKeyFile, {
    path: ['secretAccessKeyFile'],
    message: 'give secretAccessKey or secretAccessKeyFile, not both',
  })
  .refine((s3) => (s3.accessKeyId === undefined) === ((s3.secretAccessKey ?? s3.secretAccessKeyFile) === undefined), {
    path: ['accessKeyId'],
    message: 'give it with secretAccessKey or secretAccessKeyFile, or none of them',
  })
  .refine((s3) => s3.credentialsFile === undefined || (s3.accessKeyId ?? s3.sessionToken) === undefined, {
    path: ['credentialsFile'],
    message: 'give it, or accessKeyId, its secret key and sessionToken, not both',
  })
  .refine(({ credentialsFile, profile }) => profile === undefined || credentialsFile !== undefined, {
    path: ['profile'],
    message: 'is one of a credentialsFile; give that, too',
  });
export type S3Config = z.infer<typeof s3Schema>;
