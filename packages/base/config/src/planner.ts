/**
 * The planner: what the load is measured against, and where KEDA asks how many workers it needs (docs/handoff.md, "How many workers").
 * Invariant: beyond loopback the scaler speaks TLS, and lets in whoever shows a certificate, unless the network is said to be trusted.
 */
import * as z from 'zod';
import { checkListener, ip, port, serverTlsSchema } from './listener.ts';

const milliseconds = z.number().min(1).max(3_600_000);

const scalerSchema = z
  .strictObject({
    host: ip.default('127.0.0.1'),
    /** 0: any free one. */
    port: port.default(9004),
    tls: serverTlsSchema.nullable().default(null),
    /** Has to be said beyond loopback where KEDA shows no certificate. */
    trustedNetwork: z.boolean().default(false),
    /** Streams of KEDA that are open at once. */
    maxStreams: z.number().int().min(1).max(65_536).default(256),
  })
  .superRefine((value, context) => checkListener(value, context, "KEDA's"));
export type ScalerConfig = z.infer<typeof scalerSchema>;

export const plannerSchema = z.strictObject({
  /** Over which the load is measured. */
  windowMs: milliseconds.min(1_000).default(60_000),
  /** Targets: time to first token, time between tokens. */
  firstTokenMs: milliseconds.default(2_000),
  betweenTokensMs: milliseconds.default(50),
  /** Share of a worker's rate that may be in use. */
  ceiling: z.number().min(0.05).max(0.95).default(0.8),
  /** live: workers of both roles lean to prefill or to decode as the load needs it, for new requests. fixed: they take whole requests. */
  roles: z.enum(['fixed', 'live']).default('fixed'),
  /** Between two changes of what they lean to. */
  holdMs: milliseconds.default(15_000),
  /** Where KEDA asks; null: nobody does. */
  scaler: scalerSchema.nullable().default(null),
});
export type PlannerConfig = z.infer<typeof plannerSchema>;
