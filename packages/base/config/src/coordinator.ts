/** The coordinator's configuration (docs/coordinator.md). */
import * as z from 'zod';
import { bytes, logLevel } from './cache-node.ts';
import { discoverySchema } from './discovery.ts';
import { endpointPickerSchema } from './endpoint-picker.ts';
import { eventAccessSchema } from './event-access.ts';
import { checkHttpListener, httpHost, isGrpcAddress, port, serverTlsSchema } from './listener.ts';
import { operationsSchema } from './operations.ts';
import { plannerSchema } from './planner.ts';
import { podHandOffSchema } from './pod-handoff.ts';
import { workerAccessSchema } from './worker-access.ts';

/** As packages/coordinator/routing names its policies. */
export const routingPolicyNames = [
  'predicted',
  'round-robin',
  'least-loaded',
  'power-of-two',
  'bounded-hash',
  'sim-hash',
  'hash-trie',
  'balanced-tree',
  'load-band',
  'scored',
  'overlap-cost',
  'sticky',
] as const;

/** As packages/coordinator/handoff names them. */
export const splitModes = ['predicted', 'always', 'never'] as const;

const count = z.number().int().min(1).max(1_000_000);

const parts = z.strictObject({
  /** Of the API server. Beyond loopback it needs `tls` and keys or certificates of clients, or a network that is trusted. */
  host: httpHost.default('127.0.0.1'),
  port,
  tls: serverTlsSchema.nullable().default(null),
  /** Keys, one a line: each request bears one of them ("authorization: Bearer KEY"). null: none is asked for. */
  apiKeysFile: z.string().min(1).nullable().default(null),
  /** Keys for /admin, which are good for everything else, too; null: any key of `apiKeysFile` is. */
  adminKeysFile: z.string().min(1).nullable().default(null),
  /** The API server may be reached beyond loopback in plain text, and by anybody; /admin is answered to nobody there without a key. */
  trustedNetwork: z.boolean().default(false),
  /** Probes and metrics on a listener of their own; null: only at the API server. */
  operations: operationsSchema.nullable().default(null),
  /** gRPC address of the only engine worker; instead of `discovery`. */
  engine: z.string().refine(isGrpcAddress, 'write unix:/PATH or HOST:PORT').optional(),
  /** How workers and cache nodes are found. */
  discovery: discoverySchema.optional(),
  /** For workers beyond loopback. null: there are none. */
  access: workerAccessSchema.nullable().default(null),
  routing: z
    .strictObject({
      policy: z.enum(routingPolicyNames).default('predicted'),
      /** Requests that wait in front of the workers at most, and for how long. */
      maxWaiting: z.number().int().min(1).max(65_536).default(4_096),
      maxWaitMs: z.number().int().min(1).max(600_000).default(30_000),
      /** While nobody is ready, a request waits for a worker that went away, or is looked for, since less; 0: it fails at once. */
      absentMs: z.number().int().min(0).max(60_000).default(3_000),
      /** A pod (`openai`) that answers no scrape and sends nothing of any answer for so long gets no new request until it is back. */
      silentMs: z.number().int().min(100).max(60_000).default(800),
      /** Prefixes that are asked for often are copied to other workers ahead: bytes a second on average (0: never), copies at once. */
      copies: z
        .strictObject({
          bytesPerS: z
            .number()
            .int()
            .min(0)
            .max(2 ** 40)
            .default(256 << 20),
          maxUnderWay: z.number().int().min(1).max(256).default(4),
        })
        .prefault({}),
    })
    .prefault({}),
  /** Whether another worker computes a request's prompt (docs/handoff.md). */
  handoff: z
    .strictObject({
      /** predicted: where that is expected to pay. */
      split: z.enum(splitModes).default('predicted'),
      /** Without a worker for one of both roles the other one serves all of a request; false: it is refused (503). */
      fallback: z.boolean().default(true),
      /** Targets that a split is weighed by: to the first token, between two tokens. */
      ttftMs: z.number().int().min(1).max(600_000).default(2_000),
      itlMs: z.number().int().min(1).max(60_000).default(50),
      /** A prefill worker without another block for so long is given up. */
      stallMs: z.number().int().min(50).max(60_000).default(1_000),
      /** A decode worker waits for blocks so long in all. */
      deadlineMs: z.number().int().min(100).max(600_000).default(60_000),
      /** Prefill workers that are asked one after another for one prompt. */
      tries: z.number().int().min(1).max(16).default(2),
      /** Prompts that are computed for others at once, in all and by one worker. */
      maxLegs: z.number().int().min(1).max(65_536).default(1_024),
      maxLegsPerWorker: z.number().int().min(1).max(65_536).default(64),
    })
    .prefault({}),
  admission: z
    .strictObject({
      /** A request whose first token would come later is refused (429), unless it names its own limit; null: none is. */
      ttftMs: z.number().int().min(1).max(600_000).nullable().default(null),
    })
    .prefault({}),
  /** Of the API server: what one coordinator takes at once. More are refused (429), connections are closed. */
  limits: z
    .strictObject({
      connections: count.default(4_096),
      /** In progress, also those that a client sends without waiting for the answer before. */
      requests: count.default(4_096),
      /** That are generated. */
      answers: count.default(2_048),
      /** Of bodies that wait for answers of pods, all together. */
      heldBytes: bytes
        .min(16 << 20)
        .max(2 ** 40)
        .default(512 << 20),
      /** Of one body. Of larger ones fewer arrive at once: all together have 256 MiB. */
      bodyBytes: bytes
        .min(64 << 10)
        .max(128 << 20)
        .default(16 << 20),
      /** For a body above 64 KiB to get its turn, and then for the rest of it to arrive. */
      largeBodyMs: z.number().int().min(1_000).max(600_000).default(20_000),
    })
    .superRefine(({ heldBytes, bodyBytes }, context) => {
      const message = 'is less than bodyBytes, so that the largest bodies would always be refused';
      if (heldBytes < bodyBytes) context.addIssue({ code: 'custom', path: ['heldBytes'], message });
    })
    .prefault({}),
  index: z.strictObject({ maxBytes: bytes.min(4 << 20).default(256 << 20) }).prefault({}),
  /** How KV events of members on other hosts may be read. */
  kvEvents: eventAccessSchema.prefault({}),
  /** Folder of tokenizer and chat template by model name, for models whose workers do not say it. */
  tokenizers: z.record(z.string().min(1).max(1_024), z.string().min(1)).default({}),
  /** Where gateways ask which pod a request goes to; null: none asks. */
  endpointPicker: endpointPickerSchema.nullable().default(null),
  /** How many workers the load needs, and who is told. */
  planner: plannerSchema.prefault({}),
  /** Where pods of the role `prefill` compute prompts for others. */
  podHandOff: podHandOffSchema.prefault({}),
  /** After SIGTERM: answers and gateways' streams may end within this, nothing new is taken. Below the 8 s in which a process ends. */
  drainMs: z.number().int().min(0).max(6_000).default(2_000),
  /** A log line of level info for each request of the API server: who had it, why, what was predicted and what was seen. */
  logRequests: z.boolean().default(false),
  logLevel,
});

export const coordinatorSchema = parts.superRefine((value, context) =>
  checkHttpListener(value, context, "the clients'"),
);
/** As a process reads it: whole, while who puts a coordinator together may name the workers later. */
export const coordinatorServiceSchema = coordinatorSchema.superRefine(({ engine, discovery, kvEvents }, context) => {
  const issue = (key: string, message: string): void => context.addIssue({ code: 'custom', path: [key], message });
  if (engine === undefined && discovery === undefined)
    issue('engine', 'is missing, and so is "discovery": name one engine worker, or how workers are found');
  if (engine !== undefined && discovery !== undefined) issue('discovery', 'there is "engine", too; give one of them');
  // A publisher with a key of its own lets nobody in who has none; what is only discovered later is told then.
  const members = discovery?.kind === 'static' ? [...discovery.workers, ...discovery.nodes] : [];
  const keyed = members.find(({ events }) => events?.serverKey !== undefined);
  if (keyed !== undefined && kvEvents.curve === null)
    issue(
      'kvEvents',
      `${keyed.name} publishes with a CURVE key, and "curve" names none of ours: give its secretKeyFile`,
    );
});
export type CoordinatorConfig = z.infer<typeof coordinatorSchema>;
/** As it is written: what has a default may be left out. */
export type CoordinatorInput = z.input<typeof coordinatorSchema>;
