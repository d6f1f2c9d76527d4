/**
 * The Redis tier's configuration, docs/operating.md ("Redis"). What a schema can see is refused here; what only the files and the
 * servers can tell, when the tier opens.
 */
import { z } from 'zod';

const server = z
  .string()
  .regex(/^(rediss?:\/\/[^/]+|unix:\/.+)\/?$/, 'write redis://host:port, rediss://host:port or unix:/path');

/** For the namespaces whose digest begins with the policy's name (hex), or for "default". */
const policySchema = z.strictObject({
  ttlSeconds: z.number().int().positive().optional(),
  maxShare: z.number().positive().max(1).optional(),
  readOnly: z.boolean().optional(),
});

export const redisSchema = z
  .strictObject({
    mode: z.enum(['single', 'sentinel', 'cluster']).default('single'),
    /** Sentinel: the Sentinels. Cluster: some of the nodes. */
    servers: z.array(server).min(1),
    masterName: z.string().min(1).optional(),
    username: z.string().min(1).optional(),
    password: z.string().min(1).optional(),
    passwordFile: z.string().min(1).optional(),
    sentinelUsername: z.string().min(1).optional(),
    sentinelPassword: z.string().min(1).optional(),
    tls: z
      .strictObject({
        caFile: z.string().min(1).optional(),
        certFile: z.string().min(1).optional(),
        keyFile: z.string().min(1).optional(),
        serverName: z.string().min(1).optional(),
      })
      .optional(),
    database: z.number().int().min(0).default(0),
    /** Budget of all nodes that share these servers and this prefix. */
    bytes: z
      .number()
      .int()
      .min(1 << 20),
    keyPrefix: z
      .string()
      .regex(/^[\w.:-]{1,64}$/, 'use 1 to 64 letters, digits, "_", ".", ":" and "-"')
      .default('kvtier:'),
    partitions: z.number().int().min(1).max(256).optional(),
    partBytes: z
      .number()
      .int()
      .min(4096)
      .max(8 << 20)
      .default(1_048_512),
    connections: z.number().int().min(1).max(16).default(2),
    depth: z.number().int().min(1).max(16).default(2),
    timeLimitMs: z.number().int().min(50).max(60_000).default(2000),
    policies: z
      .record(
        z.string().regex(/^(default|[0-9a-f]{4,64})$/, 'name a policy "default" or by 4 to 64 hex digits'),
        policySchema,
      )
      .default({}),
  })
  .refine(({ mode, masterName }) => mode !== 'sentinel' || masterName !== undefined, {
    path: ['masterName'],
    message: 'mode sentinel needs the name of the master that the Sentinels watch',
  })
  .refine(({ password, passwordFile }) => password === undefined || passwordFile === undefined, {
    path: ['passwordFile'],
    message: 'give password or passwordFile, not both',
  });
export type RedisConfig = z.infer<typeof redisSchema>;
