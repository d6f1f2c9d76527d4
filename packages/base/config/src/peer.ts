/**
 * Peers: which nodes exchange blocks, and how they know each other. Invariant: bytes travel in the clear only on loopback, or where
 * the configuration says that the network is trusted; nobody is let in without a secret or a certificate.
 */
import * as z from 'zod';
import { ip, isLoopback, milliseconds, port } from './listener.ts';
import { secretsIn } from './peer-secrets.ts';
import { RenewedFiles } from './renewed-files.ts';
import { type OnProblem, RenewedPems } from './renewed-pems.ts';

const address = z.strictObject({ host: z.string().min(1), port: port.min(1) });
const security = z.discriminatedUnion('encryption', [
  /** TLS 1.3; certificates of one authority, PEM files; every node shows its own and checks the other's. */
  z.strictObject({
    encryption: z.literal('tls'),
    certFile: z.string().min(1),
    keyFile: z.string().min(1),
    caFile: z.string().min(1),
    /** Renewed files are looked for so often. */
    reloadMs: milliseconds.default(10_000),
  }),
  /** A shared secret; everything else can be read by who listens on the way. */
  z.strictObject({
    encryption: z.literal('none'),
    /** One secret, or two while it is changed (`peer-secrets.ts`). */
    secretFile: z.string().min(1),
    /** A renewed file is looked for so often. */
    reloadMs: milliseconds.default(10_000),
    /** Has to be said where an address is not loopback. */
    trustedNetwork: z.boolean().default(false),
  }),
]);

export const peersSchema = z
  .strictObject({
    /** Where peers reach this node; null: it only fetches. An IP address. */
    listen: z
      .strictObject({
        host: ip,
        port,
        /** Of the data connections; 0: any free one. */
        dataPort: port.default(0),
      })
      .nullable()
      .default(null),
    /** Nodes to fetch from. */
    peers: z.array(address).max(64).default([]),
    security,
    /** Data connections to each peer. */
    streams: z.number().int().min(1).max(16).default(4),
    readLimitMs: z.number().int().min(1).max(600_000).default(5000),
    /** Blocks of others that are listed, about 100 bytes each. */
    maxBlocks: z.number().int().min(1).default(16_777_216),
  })
  .superRefine((value, context) => {
    if (value.security.encryption === 'tls' || value.security.trustedNetwork) return;
    const hosts = [...(value.listen === null ? [] : [value.listen.host]), ...value.peers.map(({ host }) => host)];
    const open = hosts.find((host) => !isLoopback(host));
    if (open === undefined) return;
    const message = `${open} is not loopback: use "tls", or say "trustedNetwork": true`;
    context.addIssue({ code: 'custom', path: ['security'], message });
  });
export type PeersConfig = z.infer<typeof peersSchema>;

export type PeerCredentials = PeerTls | PeerSecret;

/** As the files hold them now; `onRenewed`: when that changes. */
export interface PeerTls {
  readonly encryption: 'tls';
  readonly cert: Buffer;
  readonly key: Buffer;
  readonly ca: Buffer;
  onRenewed(listener: () => void): void;
}

/** As the file holds them now: the next handshake has them, connections that stand stay. */
export interface PeerSecret {
  readonly encryption: 'none';
  readonly secrets: readonly Buffer[];
  readonly trustedNetwork: boolean;
}

/** The files that `security` names, looked at again and again. KvError CONFIG when one is missing, too open, or no secret. */
export function readPeerCredentials(config: PeersConfig['security'], onProblem: OnProblem): PeerCredentials {
  if (config.encryption === 'tls') {
    const pems = new RenewedPems(config, onProblem, 'peers.security');
    return {
      encryption: 'tls',
      get cert() {
        return pems.cert!;
      },
      get key() {
        return pems.key!;
      },
      get ca() {
        return pems.ca!;
      },
      onRenewed: (listener) => pems.onRenewed(listener),
    };
  }
  const { secretFile, reloadMs, trustedNetwork } = config;
  const file = new RenewedFiles({
    files: [{ key: 'peers.security.secretFile', path: secretFile, isSecret: true }],
    make: ([bytes]) => secretsIn(bytes!),
    file: 'a readable file',
    content: 'another file, made so: openssl rand -base64 48',
    ...{ reloadMs, onProblem },
  });
  return {
    encryption: 'none',
    get secrets() {
      return file.made;
    },
    trustedNetwork,
  };
}
