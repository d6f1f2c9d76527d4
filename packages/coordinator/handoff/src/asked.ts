/** What a hand-off is decided for. */
import type { DispatchRequest } from '@kvtier/dispatch';

/** What the API server knows of a request beside what the choice needs. */
export interface Asked extends Omit<DispatchRequest, 'except'> {
  /** performance.now() of its arrival. */
  readonly arrivedMs: number;
  /** Until its first token: it is refused when that would come later; undefined: it is served, however late. */
  readonly ttftMs: number | undefined;
  /** Between two tokens; undefined: as configured. */
  readonly itlMs: number | undefined;
  /** It has tokens already: it is not refused any more. */
  readonly hasBegun: boolean;
}
