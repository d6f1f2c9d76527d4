/** What a client says in headers of when it wants its tokens, by the names of llm-d. */
import type { Targets } from './answers.ts';
import { badParameter } from './errors.ts';

const mostMs = 600_000;
const ttft = ['x-llm-d-slo-ttft-ms', 'x-slo-ttft-ms'];
const itl = ['x-llm-d-slo-tpot-ms', 'x-slo-tpot-ms'];

type Headers = Readonly<Record<string, string | readonly string[] | undefined>>;

/** `ttftMs`: of requests that do not say it. @throws HttpError 400: no number of milliseconds */
export const targetsOf = (headers: Headers, ttftMs: number | undefined): Targets => ({
  ttftMs: msOf(headers, ttft) ?? ttftMs,
  itlMs: msOf(headers, itl),
});

function msOf(headers: Headers, names: readonly string[]): number | undefined {
  for (const name of names) {
    const value = headers[name];
    if (value === undefined) continue;
    const ms = typeof value === 'string' && /^\d{1,6}(\.\d{1,6})?$/.test(value) ? Number(value) : Number.NaN;
    if (ms > 0 && ms <= mostMs) return ms;
    throw badParameter(name, `header ${name}: must be milliseconds, above 0 and at most ${mostMs}.`);
  }
  return undefined;
}
