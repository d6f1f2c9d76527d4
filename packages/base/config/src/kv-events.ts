/**
 * Publishing of KV events, by an engine worker and by a cache node alike. What only the sockets and the keys can tell is refused when
 * the publisher starts. Names: vLLM's KVEventsConfig.
 */
import { readFileSync, statSync } from 'node:fs';
import { KvError } from '@kvtier/errors';
import { z } from 'zod';

/** Publishing of KV events; the names are those of vLLM's KVEventsConfig. */
export const kvEventsSchema = z.strictObject({
  /** "ipc:///PATH" or "tcp://127.0.0.1:PORT"; beyond loopback only with curve. */
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
      /** Public keys of those who may subscribe, Z85. */
      allowedClientKeys: z.array(z.string().length(40)).min(1).max(1_024),
    })
    .nullable()
    .default(null),
});
export type KvEventsConfig = z.infer<typeof kvEventsSchema>;

/** A cache node's: an engine knows the tokens of its blocks anyway. */
export const nodeEventsSchema = kvEventsSchema.extend({
  /** Memory for token ids of blocks, so that events carry them, as far as they fit; 0: events carry hashes alone. */
  tokenIdBytes: z.number().int().nonnegative().default(0),
  /** Each namespace has a topic of its own: `topic`, "@" and its first 16 hex digits. Our coordinator needs that; llm-d reads none of them. */
  namespaceTopics: z.boolean().default(true),
});

/** `curve` with the key out of its file. @throws KvError CONFIG: the file cannot be read, or others may */
export function readKvEventsCurve({ curve }: KvEventsConfig) {
  if (curve === null) return null;
  const { secretKeyFile, allowedClientKeys } = curve;
  return { secretKey: readCurveSecret('kvEvents.curve.secretKeyFile', secretKeyFile), allowedClientKeys };
}

/** `option`: for the error. @throws KvError CONFIG: the file cannot be read, or others may */
export function readCurveSecret(option: string, file: string): string {
  try {
    // As `readPem`: its owner and its group alone.
    if ((statSync(file).mode & 0o007) !== 0) throw new Error('others may read it; chmod o-rwx it');
    return readFileSync(file, 'utf8').trim();
  } catch (error) {
    throw new KvError(
      'CONFIG',
      `${option} ${file}: cannot be read (${(error as Error).message}); name a readable file`,
    );
  }
}
