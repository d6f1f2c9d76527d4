/**
 * The endpoint picker: where gateways ask (Envoy's ext_proc), where its health is asked, and its bounds. Invariant: beyond loopback it
 * speaks TLS, and lets in whoever shows a certificate, unless the configuration says that the network is trusted.
 */
import { isIP } from 'node:net';
import { z } from 'zod';

const ip = z.string().refine((host) => isIP(host) !== 0, 'an IP address');
const port = z.number().int().min(0).max(65535);
const milliseconds = z.number().int().min(1).max(86_400_000);
const count = z.number().int().positive();
const loopback = (host: string): boolean => host === '::1' || /^127\./.test(host);

/** Of a gRPC server. PEM files; they are read again when they change. */
export const serverTlsSchema = z.strictObject({
  certFile: z.string().min(1),
  keyFile: z.string().min(1),
  /** Authorities of the clients' certificates; null: a client shows none. */
  clientCaFile: z.string().min(1).nullable().default(null),
  reloadMs: milliseconds.default(10_000),
});

interface Listener {
  readonly host: string;
  readonly tls: z.infer<typeof serverTlsSchema> | null;
  readonly trustedNetwork: boolean;
}

/** Beyond loopback: TLS, and a certificate of who asks. `whose`: authority, "the gateways'". */
export function checkListener({ host, tls, trustedNetwork }: Listener, context: z.RefinementCtx, whose: string): void {
  const issue = (path: string[], message: string): void => context.addIssue({ code: 'custom', path, message });
  if (loopback(host)) return;
  if (tls === null) issue(['tls'], `${host} is not loopback: name certFile and keyFile`);
  else if (tls.clientCaFile === null && !trustedNetwork) {
    const message = `${host} is not loopback: name ${whose} authority, or say "trustedNetwork": true`;
    issue(['tls', 'clientCaFile'], message);
  }
}

export const endpointPickerSchema = z
  .strictObject({
    host: ip.default('127.0.0.1'),
    /** 0: any free one. */
    port: port.default(9002),
    /** gRPC health in plain text, as probes ask for it; null: only where gateways ask. */
    health: z
      .strictObject({
        host: ip.default('127.0.0.1'),
        port: port.default(9003),
        /** Has to be said beyond loopback: whoever reaches it learns whether we are up. */
        trustedNetwork: z.boolean().default(false),
      })
      .nullable()
      .prefault({}),
    tls: serverTlsSchema.nullable().default(null),
    /** Has to be said beyond loopback where gateways show no certificate. */
    trustedNetwork: z.boolean().default(false),
    /** How bodies come from gateways that do not say (before Envoy 1.33). */
    bodyMode: z.enum(['fullDuplex', 'buffered', 'none']).default('fullDuplex'),
    /** Endpoints that are named after the chosen one; only for gateways that try several. */
    fallbacks: z.number().int().min(0).max(7).default(0),
    /** Requests of gateways that are open at once. */
    maxStreams: count.max(1_000_000).default(8_192),
    /** Of one body that is read; a larger one is routed by load alone. */
    bodyBytes: count.max(2 ** 30).default(16 * 2 ** 20),
    /** Of all bodies that wait to be read. */
    heldBytes: count.max(2 ** 40).default(256 * 2 ** 20),
    /** For a request to arrive. */
    receiveMs: milliseconds.default(60_000),
    /** For its body to be read and a worker to be found; then it is refused (429). */
    waitMs: milliseconds.default(30_000),
    /** Without a word of its answer, a request is counted as ended. */
    silenceMs: milliseconds.default(600_000),
  })
  .superRefine((value, context) => {
    const issue = (path: string[], message: string): void => context.addIssue({ code: 'custom', path, message });
    checkListener(value, context, "the gateways'");
    if (value.health !== null && !loopback(value.health.host) && !value.health.trustedNetwork) {
      issue(['health'], `${value.health.host} is not loopback: say "trustedNetwork": true`);
    }
  });
export type EndpointPickerConfig = z.infer<typeof endpointPickerSchema>;
/** As it is written: what has a default may be left out. */
export type EndpointPickerInput = z.input<typeof endpointPickerSchema>;
