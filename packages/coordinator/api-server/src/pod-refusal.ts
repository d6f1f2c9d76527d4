/** A pod says "not here, not now", and perhaps when it may be asked again. */
import { KvError } from '@kvtier/errors';

/** Nobody is told to stay away for longer, whatever a pod says. */
const maxRetryAfterS = 60;

export class PodRefusal extends KvError {
  /** Whole seconds, 1 or more; undefined: it does not say. */
  readonly retryAfterS: number | undefined;

  /** `retryAfter`: its header, in seconds; a date says nothing to us, whose clock may be another. */
  constructor(worker: string, status: number, retryAfter: string | string[] | undefined) {
    super(status === 429 ? 'BUSY' : 'DISCONNECTED', `worker ${worker}: answers ${status}; try again`, { retry: true });
    const isSeconds = typeof retryAfter === 'string' && /^\d{1,9}$/.test(retryAfter);
    this.retryAfterS = isSeconds ? Math.min(Math.max(Number(retryAfter), 1), maxRetryAfterS) : undefined;
  }
}
