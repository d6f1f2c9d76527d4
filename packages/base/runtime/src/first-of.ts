/** Several signals as one, for as long as it is needed. */
import { setMaxListeners } from 'node:events';

export interface FirstOf {
  /** Aborted with the first of them, for its reason. */
  readonly signal: AbortSignal;
  /** It is not needed any more: nothing of it is left at any of them. */
  end(): void;
}

/**
 * As `AbortSignal.any`, and it can be ended: a signal that lives as long as its process would keep a reference to each composite that was ever
 * made of it (Node 20: also of those that were collected).
 */
export function firstOf(signals: readonly AbortSignal[]): FirstOf {
  const first = new AbortController();
  const cuts = signals.map((signal) => {
    const cut = (): void => first.abort(signal.reason);
    setMaxListeners(0, signal); // as many wait for it as there are
    if (signal.aborted) cut();
    else signal.addEventListener('abort', cut, { once: true });
    return () => signal.removeEventListener('abort', cut);
  });
  return {
    signal: first.signal,
    end: () => {
      for (const leave of cuts) leave();
    },
  };
}
