/**
 * What the simulated workers are made of. Rates of an 8-billion-parameter model in bf16 on one GPU of the H100 class, with
 * 128 KiB of keys and values a token, rounded; a run prints them. What is compared are policies in the same world.
 */
export interface Hardware {
  readonly workers: number;
  /** Prompt tokens a second. */
  readonly prefillTokensPerS: number;
  /** A step takes so long at least, and so much longer for each request that it gives a token to. */
  readonly stepS: number;
  readonly stepPerRequestS: number;
  /** Prompt tokens of one step at most. */
  readonly stepTokens: number;
  /** Tokens whose KV fits on one GPU; in the memory of its host. */
  readonly gpuTokens: number;
  readonly hostTokens: number;
  /** Tokens a second that are brought in from the host's memory, and from another host's. */
  readonly hostTokensPerS: number;
  readonly peerTokensPerS: number;
  /** What copies ahead may take of the network between hosts, on average and at once; 0: nothing is copied ahead. */
  readonly copyBytesPerS: number;
  readonly maxCopies: number;
  readonly maxRunning: number;
  readonly kvBytesPerToken: number;
}

export const hardware: Hardware = {
  workers: 8,
  prefillTokensPerS: 20_000,
  stepS: 0.008,
  stepPerRequestS: 0.000_1,
  stepTokens: 2_048,
  gpuTokens: 400_000,
  hostTokens: 1_600_000,
  hostTokensPerS: 320_000,
  peerTokensPerS: 80_000,
  copyBytesPerS: 2 ** 30,
  maxCopies: 4,
  maxRunning: 128,
  kvBytesPerToken: 131_072,
};
