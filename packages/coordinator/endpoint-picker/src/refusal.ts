/** Why a request gets no endpoint, and what its client is told: a status, OpenAI's shape of an error, llm-d's header. */
import { Saturated } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';

/** Of `kvtier_picker_requests_total`; and `x-llm-d-request-dropped-reason` of those that are refused. */
export type Outcome = 'picked' | 'no_worker' | 'saturated' | 'stalled' | 'refused' | 'cancelled' | 'failed';

export class Refusal extends Error {
  override readonly name = 'Refusal';
  readonly status: number;
  readonly outcome: Outcome;
  readonly retryAfterS: number | undefined;

  constructor(status: number, outcome: Outcome, message: string, retryAfterS?: number) {
    super(message);
    this.status = status;
    this.outcome = outcome;
    this.retryAfterS = retryAfterS;
  }

  /** JSON, as OpenAI's API tells errors. */
  get body(): string {
    const type =
      this.status === 429 ? 'rate_limit_error' : this.status < 500 ? 'invalid_request_error' : 'server_error';
    return JSON.stringify({ error: { message: this.message, type, param: null, code: this.outcome } });
  }
}

export const noWorker = (message: string): Refusal => new Refusal(503, 'no_worker', message, 1);
export const saturated = (message: string, retryAfterS = 1): Refusal =>
  new Refusal(429, 'saturated', message, retryAfterS);
export const stalled = (message: string): Refusal => new Refusal(408, 'stalled', message);

/** What Dispatch threw, or anything else. A defect of ours is told without its inner details. */
export function refusalOf(thrown: unknown): Refusal {
  if (thrown instanceof Refusal) return thrown;
  if (!(thrown instanceof KvError)) return new Refusal(500, 'failed', 'The endpoint picker failed on this request.');
  switch (thrown.code) {
    case 'DISCONNECTED':
      return noWorker(thrown.message);
    case 'BUSY':
    case 'CAPACITY':
      return saturated(thrown.message, thrown instanceof Saturated ? thrown.retryAfterS : 1);
    case 'REQUEST':
    case 'TOO_LONG':
      return new Refusal(400, 'refused', thrown.message);
    case 'CANCELLED':
      return new Refusal(499, 'cancelled', thrown.message);
    case 'DEADLINE':
      return new Refusal(503, 'failed', thrown.message, 1);
    default:
      return new Refusal(500, 'failed', thrown.message);
  }
}
