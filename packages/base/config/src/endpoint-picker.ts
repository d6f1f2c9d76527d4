/**
 * The endpoint picker: where gateways ask (Envoy's ext_proc), where its health is asked, and its bounds. Invariant: beyond loopback it
 * speaks TLS, and lets in whoever shows a certificate, unless the configuration says that the network is trusted.
 */
import * as z from 'zod';
import { checkListener, ip, isLoopback, port, serverTlsSchema } from './listener.ts';

const milliseconds = z.number().int().min(1).max(86_400_000);
const count = z.number().int().positive();

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
    /** For a gateway to read the end of a stream; then the stream is reset. */
    endMs: milliseconds.default(5_000),
  })
  .superRefine((value, context) => {
    const issue = (path: string[], message: string): void => context.addIssue({ code: 'custom', path, message });
    checkListener(value, context, "the gateways'");
    if (value.health !== null && !isLoopback(value.health.host) && !value.health.trustedNetwork) {
      issue(['health'], `${value.health.host} is not loopback: say "trustedNetwork": true`);
    }
  });
export type EndpointPickerConfig = z.infer<typeof endpointPickerSchema>;
/** As it is written: what has a default may be left out. */
export type EndpointPickerInput = z.input<typeof endpointPickerSchema>;
