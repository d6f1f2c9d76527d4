/**
 * How a coordinator may read KV events of members on other hosts: with CURVE keys, by which publisher and reader know each other and what
 * is said is encrypted. On Unix sockets and on loopback nothing of this is needed.
 */
import * as z from 'zod';
import { curveKeysIn, curvePublicKey } from './curve-keys.ts';
import { curveSecretFile } from './kv-events.ts';
import { milliseconds } from './listener.ts';
import { curveKey } from './membership.ts';
import { RenewedFiles } from './renewed-files.ts';
import type { OnProblem } from './renewed-pems.ts';

export const eventAccessSchema = z.strictObject({
  /** Our own pair of keys; publishers list the public one. null: only local publishers are read. */
  curve: z
    .strictObject({
      /** It follows from the secret one; given, the file has to have its pair. */
      publicKey: curveKey.nullable().default(null),
      /** File with the secret key, Z85; readable by nobody else. */
      secretKeyFile: z.string().min(1),
      /** Public key of publishers whose record names none (`events.serverKey`); null: these are not read. */
      serverKey: curveKey.nullable().default(null),
      /** The same in a file, which may hold two, one a line, while publishers change theirs. */
      serverKeyFile: z.string().min(1).nullable().default(null),
      /** Renewed files are looked for so often. */
      reloadMs: milliseconds.default(10_000),
    })
    .refine(({ serverKey, serverKeyFile }) => serverKey === null || serverKeyFile === null, {
      path: ['serverKeyFile'],
      message: 'give serverKey or serverKeyFile, not both',
    })
    .nullable()
    .default(null),
  /** Publishers on other hosts are read without keys, too: what anybody there says is believed, and anybody may listen. */
  trustedNetwork: z.boolean().default(false),
});
export type EventAccessConfig = z.infer<typeof eventAccessSchema>;

/** What the index' feed takes as `access`: as the files hold it now. */
export interface EventAccess {
  readonly curve: CurveClientKeys | undefined;
  readonly trustedNetwork: boolean;
}

export interface CurveClientKeys {
  readonly publicKey: string;
  readonly secretKey: string;
  /** Of publishers whose record names none: each has one of them. */
  readonly serverKeys: readonly string[];
}

/** With the keys out of their files. @throws KvError CONFIG */
export function readEventAccess({ curve, trustedNetwork }: EventAccessConfig, onProblem: OnProblem): EventAccess {
  if (curve === null) return { curve: undefined, trustedNetwork };
  const { publicKey, secretKeyFile, serverKey, serverKeyFile, reloadMs } = curve;
  const secret = curveSecretFile(secretKeyFile, reloadMs, onProblem, (key) => {
    if (publicKey !== null && curvePublicKey(key) !== publicKey)
      throw new Error('is not the secret of publicKey, which may be left out');
  });
  const servers =
    serverKeyFile === null
      ? { made: serverKey === null ? [] : [serverKey] }
      : new RenewedFiles({
          files: [{ key: 'kvEvents.curve.serverKeyFile', path: serverKeyFile, isSecret: false }],
          make: ([file]) => curveKeysIn(file!, maxServerKeys),
          file: 'a readable file of public keys',
          content: 'a file with the public CURVE key of publishers, or two while it is changed',
          ...{ reloadMs, onProblem },
        });
  const keys: CurveClientKeys = {
    get publicKey() {
      return curvePublicKey(secret.made);
    },
    get secretKey() {
      return secret.made;
    },
    get serverKeys() {
      return servers.made;
    },
  };
  return { curve: keys, trustedNetwork };
}

const maxServerKeys = 2;
