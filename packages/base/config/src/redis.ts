/**
 * Redis, as configuration has it: the tier (docs/operating.md, "Redis"), and the list of a cluster's members (docs/cluster.md). What a schema can see is refused here; what only the files and the
 * servers can tell, when the tier opens.
 */
import * as z from 'zod';
import { milliseconds } from './listener.ts';

const keyPrefix = z
  .string()
  .regex(/^[\w.:-]{1,64}$/, 'use 1 to 64 letters, digits, "_", ".", ":" and "-"')
  .default('kvtier:');
const forms = 'write redis://host:port, rediss://host:port or unix:/path';
const server = z
  .string()
  .regex(/^(rediss?:\/\/[^/]+|unix:\/.+)\/?$/, forms)
  .refine(
    (text) => URL.canParse(text) && (text.startsWith('unix:') || new URL(text).hostname !== ''),
    `is no URL; ${forms}`,
  )
  .refine(
    isWhole,
    `is followed by ? or # (the database has an option of its own; in a password or a path write %3F and %23); ${forms}`,
  )
  .refine(
    isDecodable(({ username, password }) => username + password),
    'has a % in its user or password that must be written %25',
  )
  .refine(
    isDecodable(({ pathname }) => pathname),
    'has a % in its path that must be written %25',
  );

function isWhole(text: string): boolean {
  if (!URL.canParse(text)) return true; // told already
  const { search, hash } = new URL(text);
  return search === '' && hash === '';
}

function isDecodable(partOf: (url: URL) => string): (text: string) => boolean {
  return (text) => {
    if (!URL.canParse(text)) return true; // told already
    try {
      decodeURIComponent(partOf(new URL(text)));
      return true;
    } catch {
      return false;
    }
  };
}

/** For the namespaces whose digest begins with the policy's name (hex), or for "default". */
const policySchema = z.strictObject({
  ttlSeconds: z.number().int().positive().optional(),
  maxShare: z.number().positive().max(1).optional(),
  readOnly: z.boolean().optional(),
});

/** Which servers, and what to show them. */
const servers = {
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
  /** How often these files are looked at for new ones. */
  reloadMs: milliseconds.default(10_000),
  database: z.number().int().min(0).default(0),
};

/** What the servers' fields tell together. */
function checkServers<T extends z.ZodType<ServersFields>>(schema: T): T {
  return schema
    .refine(({ mode, masterName }) => mode !== 'sentinel' || masterName !== undefined, {
      path: ['masterName'],
      message: 'mode sentinel needs the name of the master that the Sentinels watch',
    })
    .refine(({ password, passwordFile }) => password === undefined || passwordFile === undefined, {
      path: ['passwordFile'],
      message: 'give password or passwordFile, not both',
    })
    .refine(({ mode, servers: { length } }) => mode !== 'single' || length <= 1, {
      path: ['mode'],
      message: 'single, and there are several servers; write cluster or sentinel, or name one server',
    })
    .refine(({ mode, database }) => mode !== 'cluster' || database === 0, {
      path: ['database'],
      message: 'a cluster has 0 only; leave it out',
    })
    .refine(({ mode, servers: all }) => mode === 'single' || !all.some((each) => each.startsWith('unix:')), {
      path: ['servers'],
      message:
        'names a Unix socket, which Sentinels and a cluster have not; write redis://host:port or rediss://host:port',
    })
    .refine(({ servers: all }) => new Set(all.map(isTls)).size <= 1, {
      path: ['servers'],
      message: 'some with TLS and some without; write rediss: for all of them',
    })
    .refine(({ servers: all, tls }) => tls === undefined || all.some(isTls), {
      path: ['tls'],
      message: 'no server speaks it; write rediss: for the servers, or leave it out',
    });
}
const isTls = (url: string): boolean => url.startsWith('rediss:');
type ServersFields = z.infer<z.ZodObject<typeof servers>>;

export const redisSchema = checkServers(
  z.strictObject({
    ...servers,
    /** Budget of all nodes that share these servers and this prefix. */
    bytes: z
      .number()
      .int()
      .min(1 << 20),
    keyPrefix,
    partitions: z.number().int().min(1).max(256).optional(),
    partBytes: z
      .number()
      .int()
      .min(4096)
      .max(8 << 20)
      .default(1_048_512),
    connections: z.number().int().min(1).max(16).default(2),
    depth: z.number().int().min(1).max(16).default(3),
    timeLimitMs: z.number().int().min(50).max(60_000).default(2000),
    policies: z
      .record(
        z.string().regex(/^(default|[0-9a-f]{4,64})$/, 'name a policy "default" or by 4 to 64 hex digits'),
        policySchema,
      )
      .default({}),
  }),
);
export type RedisConfig = z.infer<typeof redisSchema>;

const isLoopback = (host: string): boolean => /^(127\.[\d.]+|localhost|\[?::1\]?)$/.test(host);

/**
 * Where the list of members is. Who may write into it decides where prompts go, and who may read it knows where: beyond loopback
 * only with TLS and a password, or where the configuration says that the network is trusted.
 */
export const memberServersSchema = checkServers(
  z.strictObject({
    ...servers,
    /** One cluster's members; another prefix is another cluster. */
    keyPrefix,
    timeLimitMs: z.number().int().min(50).max(10_000).default(500),
    trustedNetwork: z.boolean().default(false),
  }),
).superRefine((value, context) => {
  if (value.trustedNetwork) return;
  for (const [index, server] of value.servers.entries()) {
    const url = URL.canParse(server) ? new URL(server) : undefined;
    if (url === undefined || url.protocol === 'unix:' || isLoopback(url.hostname)) continue;
    const hasPassword = value.password !== undefined || value.passwordFile !== undefined || url.password !== '';
    if (url.protocol === 'rediss:' && hasPassword) continue;
    const message = `${url.hostname} is not loopback: use rediss: and a password, or say "trustedNetwork": true`;
    context.addIssue({ code: 'custom', path: ['servers', index], message });
  }
});
export type MemberServers = z.infer<typeof memberServersSchema>;
