/** All workers of a model have enough to do: the client is told when to come again. */
import { KvError } from '@kvtier/errors';

/** Nobody is told to stay away for longer, whatever the queue. */
const maxRetryAfterS = 60;

export class Saturated extends KvError {
  /** Whole seconds, 1 or more: when the queue is expected to have moved on. */
  readonly retryAfterS: number;

  constructor(message: string, expectedS: number) {
    super('BUSY', message, { retry: true });
    this.retryAfterS = Math.min(Math.max(Math.ceil(expectedS), 1), maxRetryAfterS);
  }
}
