/**
 * How a coordinator may read KV events of members on other hosts: with CURVE keys, by which publisher and reader know each other and what
 * is said is encrypted. On Unix sockets and on loopback nothing of this is needed.
 */
import { z } from 'zod';
import { readCurveSecret } from './kv-events.ts';
import { curveKey } from './membership.ts';

export const eventAccessSchema = z.strictObject({
  /** Our own pair of keys; publishers list the public one. null: only local publishers are read. */
  curve: z
    .strictObject({
      publicKey: curveKey,
      /** File with the secret key, Z85; readable by nobody else. */
      secretKeyFile: z.string().min(1),
      /** Public key of publishers whose record names none (`events.serverKey`); null: these are not read. */
      serverKey: curveKey.nullable().default(null),
    })
    .nullable()
    .default(null),
  /** Publishers on other hosts are read without keys, too: what anybody there says is believed, and anybody may listen. */
  trustedNetwork: z.boolean().default(false),
});
export type EventAccessConfig = z.infer<typeof eventAccessSchema>;

/** What the index' feed takes as `access`. */
export interface EventAccess {
  readonly curve:
    | { readonly publicKey: string; readonly secretKey: string; readonly serverKey: string | null }
    | undefined;
  readonly trustedNetwork: boolean;
}

/** With the key out of its file. @throws KvError CONFIG */
export function readEventAccess({ curve, trustedNetwork }: EventAccessConfig): EventAccess {
  if (curve === null) return { curve: undefined, trustedNetwork };
  const { publicKey, secretKeyFile, serverKey } = curve;
  const secretKey = readCurveSecret('kvEvents.curve.secretKeyFile', secretKeyFile);
  return { curve: { publicKey, secretKey, serverKey }, trustedNetwork };
}
