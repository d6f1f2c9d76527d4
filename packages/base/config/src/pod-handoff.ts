/** Prefill and decode apart for pods with OpenAI's API (docs/handoff.md, "Pods of vLLM and SGLang"): when, and how long it may take. */
import * as z from 'zod';

export const podHandOffSchema = z.strictObject({
  /** Prompt tokens that the decode pod would have to compute: with fewer a request is not split. */
  minUncachedTokens: z.number().int().min(1).max(1_000_000_000).default(512),
  /**
   * Where the decode pod has answers under way, a prompt may be so much slower by way of a prefill pod, as a multiple of the time for which
   * it would hold them up.
   */
  patience: z.number().min(0).max(100).default(1),
  /** Of the prefill leg, waiting included; then the decode pod computes the prompt itself. */
  prefillMs: z.number().int().min(1).max(3_600_000).default(30_000),
  /** Prefill pods that are tried one after another, within that time. */
  prefillTries: z.number().int().min(1).max(8).default(2),
  /** The decode pod computes the prompt itself where prefill failed or has nobody; false: the client is told 503. */
  fallback: z.boolean().default(true),
  /**
   * Any client may tell pods where blocks come from, go to and stay (`kv_transfer_params`); false: at the API server keys of
   * `adminKeysFile` alone. For a proxy in front that hands prefill's answer on, and nobody else.
   */
  clientParams: z.boolean().default(false),
});
export type PodHandOffConfig = z.infer<typeof podHandOffSchema>;
