/** All the API server's limits in one place; those that grow with a machine are the configuration's, too (`limits`). */
export interface ApiServerLimits {
  /** A prompt of a million token ids fits. */
  readonly bodyBytes: number;
  /** For a request's head and body to arrive. */
  readonly receiveMs: number;
  readonly connections: number;
  /** In progress at once, also those that a client sends without waiting for the answer before. */
  readonly requests: number;
  /** Bodies above 64 KiB that arrive or are being read at once; the others wait. */
  readonly largeBodies: number;
  /** For its turn, of a large body; and then, from 64 KiB on, for the rest of it to arrive. */
  readonly largeBodyMs: number;
  /** A client that takes nothing of its answer for so long is cut off. */
  readonly unreadMs: number;
  /** Bodies that wait for their workers' answers, all together: a body goes on as it came, and may have to go to another worker. */
  readonly heldBytes: number;
  /** Answers generated at once; the engine's own queue is shorter by default (1,024 waiting). */
  readonly answersRunning: number;
  /** Answers run and none has a token for so long: /health says 503. */
  readonly stallMs: number;
  /** Workers that may fail one after another with one answer, without a token between them. */
  readonly tries: number;
  /** From a worker's failure on, another one is looked for so long. */
  readonly retryMs: number;
  /** While nobody is ready, a request waits for a worker that went away, or is looked for, since less; 0: it fails at once. */
  readonly absentMs: number;
  /** What running answers get at close before they are cut; a coordinator's `drainMs`. */
  readonly closeGraceMs: number;
}

const defaultLimits: ApiServerLimits = {
  bodyBytes: 16 << 20,
  receiveMs: 60_000,
  connections: 4_096,
  requests: 4_096,
  largeBodies: 16,
  largeBodyMs: 20_000,
  unreadMs: 60_000,
  heldBytes: 512 << 20,
  answersRunning: 2_048,
  stallMs: 120_000,
  tries: 5,
  retryMs: 10_000,
  absentMs: 3_000,
  closeGraceMs: 2_000,
};

/** Of the large bodies that arrive or are being read at once, but for one that is larger by itself. */
const largeBodiesBytes = 256 << 20;
/** Of `receiveMs`, for a request's head and the first 64 KiB of its body. */
const beginMs = 20_000;

/** What is not given goes with what is: fewer large bodies where each may be larger, more time for a request where such a body has more. */
export function limitsOf(given: Partial<ApiServerLimits> = {}): ApiServerLimits {
  const { bodyBytes, largeBodyMs } = { ...defaultLimits, ...given };
  const places = Math.floor(largeBodiesBytes / bodyBytes);
  return {
    ...defaultLimits,
    largeBodies: Math.max(1, Math.min(defaultLimits.largeBodies, places)),
    receiveMs: Math.max(defaultLimits.receiveMs, beginMs + 2 * largeBodyMs),
    ...given,
  };
}
