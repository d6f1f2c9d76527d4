/** What the API server takes at most, and how long it waits: all in one place. */
import type { HttpLimits } from './http-app.ts';

export interface ApiServerLimits extends HttpLimits {
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
  /** What running answers get at close before they are cut. */
  readonly closeGraceMs: number;
}

export const defaultLimits: ApiServerLimits = {
  bodyBytes: 16 << 20,
  receiveMs: 60_000,
  connections: 4_096,
  requests: 4_096,
  largeBodies: 16,
  largeBodyMs: 20_000,
  unreadMs: 60_000,
  answersRunning: 2_048,
  stallMs: 120_000,
  tries: 5,
  retryMs: 10_000,
  absentMs: 3_000,
  closeGraceMs: 2_000,
};

/** Of the listener for probes and scrapes. */
export const operationsLimits: Partial<HttpLimits> = {
  bodyBytes: 1 << 10,
  receiveMs: 10_000,
  connections: 256,
  requests: 64,
};
