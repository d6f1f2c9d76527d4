/**
 * Publishing of KV events, by an engine worker and by a cache node alike. What only the sockets and the keys can tell is refused when
 * the publisher starts. Names: vLLM's KVEventsConfig.
 *
 * Invariant: an endpoint that others than this host reach is taken only with CURVE, or where the network is said to be trusted.
 */
import * as z from 'zod';
import { curveKeyIn, curveKeysIn } from './curve-keys.ts';
import { unbindable } from './event-endpoint.ts';
import { milliseconds } from './listener.ts';
import { RenewedFiles } from './renewed-files.ts';
import type { OnProblem } from './renewed-pems.ts';

const maxClients = 1_024;

const publishing = z.strictObject({
  /** "ipc:///PATH" or "tcp://127.0.0.1:PORT"; beyond loopback only with curve, or trustedNetwork. */
  endpoint: z.string().min(1),
  /** Where who missed batches asks for them; null: nowhere. */
  replayEndpoint: z.string().min(1).nullable().default(null),
  topic: z.string().max(255).default(''),
  /** Batches, and bytes of them, that can be replayed. */
  bufferSteps: z.number().int().min(1).max(1_000_000).default(10_000),
  bufferBytes: z
    .number()
    .int()
    .positive()
    .default(64 * 2 ** 20),
  /** Batches that ZeroMQ holds for one slow subscriber. */
  hwm: z.number().int().min(1).max(1_000_000).default(10_000),
  maxQueueSize: z.number().int().min(1).max(1_000_000).default(10_000),
  /** Least milliseconds between two batches of an engine's steps. */
  gatherMs: z.number().min(0).max(1_000).default(5),
  /** Hashes as 64-bit integers (vLLM's default), or whole. */
  intBlockHashes: z.boolean().default(true),
  /** array: for consumers from before June 2026. */
  encoding: z.enum(['map', 'array']).default('map'),
  curve: z
    .strictObject({
      /** File with our secret key, Z85; readable by nobody else. */
      secretKeyFile: z.string().min(1),
      /** Public keys of those who may subscribe, Z85; or a file of them, one a line. */
      allowedClientKeys: z.array(z.string().length(40)).min(1).max(maxClients).optional(),
      allowedClientKeysFile: z.string().min(1).optional(),
      /** Renewed files are looked for so often. */
      reloadMs: milliseconds.default(10_000),
    })
    .refine((curve) => (curve.allowedClientKeys === undefined) !== (curve.allowedClientKeysFile === undefined), {
      path: ['allowedClientKeys'],
      message: 'give it or allowedClientKeysFile, and not both',
    })
    .nullable()
    .default(null),
  /** Has to be said beyond loopback where there is no curve: whoever reaches an endpoint reads hashes and token ids. */
  trustedNetwork: z.boolean().default(false),
});
type Endpoints = Pick<z.infer<typeof publishing>, 'endpoint' | 'replayEndpoint' | 'curve' | 'trustedNetwork'>;

/** What the publisher would refuse to bind. */
function checkEndpoints(publisher: Endpoints, context: z.RefinementCtx): void {
  const { endpoint, replayEndpoint, curve, trustedNetwork } = publisher;
  for (const [key, place] of Object.entries({ endpoint, replayEndpoint })) {
    const message = place === null ? undefined : unbindable(place, { hasCurve: curve !== null, trustedNetwork });
    if (message !== undefined) context.addIssue({ code: 'custom', path: [key], message });
  }
}

/** Publishing of KV events; the names are those of vLLM's KVEventsConfig. */
export const kvEventsSchema = publishing.superRefine(checkEndpoints);
export type KvEventsConfig = z.infer<typeof kvEventsSchema>;

/** A cache node's: an engine knows the tokens of its blocks anyway. */
export const nodeEventsSchema = publishing
  .extend({
    /**
     * Memory for token ids of blocks, so that events carry them, as far as they fit; 0: events carry hashes alone. It is of V8's heap,
     * which holds no more of them than that.
     */
    tokenIdBytes: z
      .number()
      .int()
      .min(0)
      .max(2 ** 31)
      .default(0),
    /** Each namespace has a topic of its own: `topic`, "@" and its first 16 hex digits. Our coordinator needs that; llm-d reads none of them. */
    namespaceTopics: z.boolean().default(true),
  })
  .superRefine(checkEndpoints);

/** A publisher's own key and those of who may subscribe, as the files hold them now. */
export interface CurveServerKeys {
  readonly secretKey: string;
  readonly allowedClientKeys: readonly string[];
  /** Told when the secret key is another one. */
  onRenewed(listener: () => void): void;
}

/** `curve` with the keys out of its files. @throws KvError CONFIG: a file cannot be read, or others may, or it holds no key */
export function readKvEventsCurve({ curve }: KvEventsConfig, onProblem: OnProblem): CurveServerKeys | null {
  if (curve === null) return null;
  const { secretKeyFile, allowedClientKeys = [], allowedClientKeysFile, reloadMs } = curve;
  const secret = curveSecretFile(secretKeyFile, reloadMs, onProblem);
  const allowed =
    allowedClientKeysFile === undefined
      ? { made: allowedClientKeys }
      : new RenewedFiles({
          files: [{ key: 'kvEvents.curve.allowedClientKeysFile', path: allowedClientKeysFile, isSecret: false }],
          make: ([file]) => curveKeysIn(file!, maxClients),
          file: 'a readable file of public keys',
          content: 'a file of public CURVE keys, one a line',
          ...{ reloadMs, onProblem },
        });
  return {
    get secretKey() {
      return secret.made;
    },
    get allowedClientKeys() {
      return allowed.made;
    },
    onRenewed(listener) {
      secret.onRenewed = listener;
    },
  };
}

/** @throws KvError CONFIG: the file cannot be read, or others may, or it holds no key */
export const curveSecretFile = (
  path: string,
  reloadMs: number,
  onProblem: OnProblem,
  check: (key: string) => void = () => {},
): RenewedFiles<string> =>
  new RenewedFiles({
    files: [{ key: 'kvEvents.curve.secretKeyFile', path, isSecret: true }],
    make: ([file]) => {
      const key = curveKeyIn(file!);
      check(key);
      return key;
    },
    file: 'a readable file',
    content: 'a file with a secret CURVE key, 40 characters of Z85',
    ...{ reloadMs, onProblem },
  });
