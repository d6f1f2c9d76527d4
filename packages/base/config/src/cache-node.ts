/**
 * The cache node's configuration: its tiers, what the store does with each of them, and who may hold how much. What one
 * field can tell is refused by its type, what two fields tell together at the end; each problem is one line with its path.
 */
import * as z from 'zod';
import { groupSchema } from './group.ts';
import { nodeEventsSchema } from './kv-events.ts';
import { checkAnnounced, nodeMembershipSchema } from './membership.ts';
import { nodeOperationsSchema } from './operations.ts';
import { peersSchema } from './peer.ts';
import { redisSchema } from './redis.ts';
import { s3Schema } from './s3.ts';

export const bytes = z.number().int().positive();
export const logLevel = z.enum(['trace', 'debug', 'info', 'warn', 'error', 'silent']).default('info');

/** As `policyNames` of packages/base/eviction has them. */
const evictionNames = ['lru', 'lfu', 'fifo', 's3-fifo'] as const;

/** The lower tiers, by the names that stats and spans use. */
export const lowerTierNames = ['disk', 'redis', 's3'] as const;

/** What the store does with one lower tier. */
export const placementSchema = z.strictObject({
  /**
   * through: at commit. selective: when `admission` says so. back: before the arena will evict it. none: never; what is there
   * is still read.
   */
  write: z.enum(['through', 'selective', 'back', 'none']).default('through'),
  admission: z.enum(['always', 'second-touch']).default('second-touch'),
  /** What is loaded from a slower tier is written here, too. */
  promote: z.boolean().default(true),
  /**
   * Write-down begins when so long no block was committed, at the latest after eight times that: a prompt that is being
   * computed needs the processors. Absent: 1000 for the disk, 0 for tiers that nodes share, because others wait for these.
   */
  settleMs: z.number().int().min(0).max(60_000).optional(),
  /** Used where it pays; what another codec wrote is read all the same. */
  codec: z.enum(['none', 'lz4', 'planes+lz4']).default('none'),
  /** This node removes its blocks so long after it has seen them come; absent: never. */
  ttlSeconds: z
    .number()
    .int()
    .min(1)
    .max(10 * 365 * 86_400)
    .optional(),
});

/** Payload bytes of one tenant. */
const quotaSchema = z.strictObject({ arena: bytes.optional(), disk: bytes.optional() });

export const cacheNodeSchema = z
  .strictObject({
    /** Unix socket of the session link. */
    socketPath: z.string().min(1),
    /** Everything persistent of this node; one node at a time (locked). */
    dataDir: z.string().min(1),
    /** Who is in this group, by name or number, may attach, too: containers of a pod that run as users of their own. */
    group: groupSchema,
    arena: z.strictObject({
      bytes: bytes.min(1 << 20),
      /** Folder of the shared-memory file. */
      dir: z.string().default('/dev/shm'),
      /** What is evicted first. */
      eviction: z.enum(evictionNames).default('lru'),
    }),
    /** null: no disk tier. */
    disk: z
      .strictObject({
        bytes: bytes.min(8 << 20),
        /**
         * Folders, each on a device of its own, blocks striped over them; a path without a budget of its own gets an even share
         * of `bytes`. Default: one folder in the data folder.
         */
        dirs: z
          .array(z.union([z.string().min(1), z.strictObject({ dir: z.string().min(1), bytes: bytes.min(8 << 20) })]))
          .min(1)
          .optional(),
        eviction: z.enum(evictionNames).default('lru'),
        ioBackend: z.enum(['auto', 'io_uring', 'threads']).default('auto'),
        segmentBytes: bytes.optional(),
      })
      .nullable(),
    /** null: no Redis tier. */
    redis: redisSchema.nullable().default(null),
    /** null: no S3 tier. */
    s3: s3Schema.nullable().default(null),
    /** null: no blocks are exchanged with other nodes. */
    peers: peersSchema.nullable().default(null),
    /** By tier; a tier that is not named is written through. */
    placement: z
      .strictObject({
        disk: placementSchema.optional(),
        redis: placementSchema.optional(),
        s3: placementSchema.optional(),
      })
      .default({}),
    /** By tenant; "*" is every tenant that is not named. Without a quota a tenant takes what it gets. */
    quotas: z.record(z.string().max(200), quotaSchema).default({}),
    /** What each tier comes to hold and loses, for routers; null: not published. About 10 bytes per held block for replays. */
    kvEvents: nodeEventsSchema.nullable().default(null),
    /** Its place in the list of members in Redis; null: it is not announced. */
    membership: nodeMembershipSchema,
    /** Where probes and scrapes ask; null: nothing listens. */
    operations: nodeOperationsSchema.nullable().default(null),
    logLevel,
  })
  .superRefine((node, context) => {
    const refuse: Refuse = (path, message) => context.addIssue({ code: 'custom', path, message });
    checkFolders(node.disk, refuse);
    const { membership, kvEvents, peers } = node;
    const peer = membership?.peer === undefined ? peers?.listen : membership.peer; // null: it only fetches
    const place = peer == null ? null : `${peer.host === '::' ? '[::]' : peer.host}:${peer.port}`;
    if (membership !== null) checkAnnounced({ membership, kvEvents }, 'peer', place, context);
    for (const tier of lowerTierNames) {
      if (node.placement[tier] !== undefined && node[tier] === null) {
        refuse(['placement', tier], `there is no ${tier} tier; configure "${tier}" or remove this`);
      }
    }
    for (const [tenant, quota] of Object.entries(node.quotas)) {
      if (quota.disk !== undefined && node.disk === null) {
        refuse(['quotas', tenant, 'disk'], 'there is no disk tier; configure "disk" or remove this');
      }
      if (quota.arena !== undefined && quota.arena > node.arena.bytes) {
        refuse(['quotas', tenant, 'arena'], `more than the ${node.arena.bytes} bytes of the arena`);
      }
    }
  });

type Refuse = (path: string[], message: string) => void;
type Folders = readonly (string | { readonly dir: string; readonly bytes: number })[];
type Disk = { readonly bytes: number; readonly dirs?: Folders | undefined } | null;

function checkFolders(disk: Disk, refuse: Refuse): void {
  if (disk?.dirs === undefined) return;
  const paths = disk.dirs.map((each) => (typeof each === 'string' ? each : each.dir));
  const again = paths.findIndex((dir, at) => paths.indexOf(dir) < at);
  if (again !== -1) refuse(['disk', 'dirs', String(again)], 'is named twice; name folders that are different');
  const own = disk.dirs.reduce((sum, each) => sum + (typeof each === 'string' ? 0 : each.bytes), 0);
  if (own > disk.bytes)
    refuse(
      ['disk', 'dirs'],
      `their bytes are ${own}, more than the ${disk.bytes} of disk.bytes; lower them or raise that`,
    );
}

export type CacheNodeConfig = z.infer<typeof cacheNodeSchema>;
/** As it is written: what has a default may be left out. */
export type CacheNodeInput = z.input<typeof cacheNodeSchema>;
