/**
 * What clients say of a request in its headers, whichever way it comes in: what it belongs to, and when its tokens are wanted. By the
 * names that gateways and llm-d give them. All of it comes from outside, and is clipped and checked here.
 */
import { KvError } from '@kvtier/errors';

/** By lower-case names. */
export type Headers = Readonly<Record<string, string | readonly string[] | undefined>>;

/** What a client wants, in milliseconds; undefined: it does not say. */
export interface Targets {
  readonly ttftMs: number | undefined;
  readonly itlMs: number | undefined;
}

/** Of each the first one that is there counts. */
export const sessionHeaders = [
  'x-session-id',
  'x-session-token',
  'x-session-affinity',
  'x-claude-code-session-id',
] as const;
const ttft = ['x-llm-d-slo-ttft-ms', 'x-slo-ttft-ms'] as const;
const itl = ['x-llm-d-slo-tpot-ms', 'x-slo-tpot-ms'] as const;
export const targetHeaders = [...ttft, ...itl] as const;

const mostMs = 600_000;
const maxSessionChars = 512;

/** A name for what belongs together; empty: none. */
export function sessionIn(headers: Headers): string {
  for (const name of sessionHeaders) {
    const value = headers[name];
    if (typeof value === 'string' && value !== '') return value.slice(0, maxSessionChars);
  }
  return '';
}

/** `ttftMs`: of requests that do not say it. @throws KvError REQUEST: no number of milliseconds */
export const targetsIn = (headers: Headers, ttftMs: number | undefined): Targets => ({
  ttftMs: msOf(headers, ttft) ?? ttftMs,
  itlMs: msOf(headers, itl),
});

function msOf(headers: Headers, names: readonly string[]): number | undefined {
  for (const name of names) {
    const value = headers[name];
    if (value === undefined) continue;
    const ms = typeof value === 'string' && /^\d{1,6}(\.\d{1,6})?$/.test(value) ? Number(value) : Number.NaN;
    if (ms > 0 && ms <= mostMs) return ms;
    throw new KvError('REQUEST', `header ${name}: must be milliseconds, above 0 and at most ${mostMs}`);
  }
  return undefined;
}
