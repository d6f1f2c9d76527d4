/**
 * A lookup beyond gaps: which of all the hashes are held, wherever in the chain. Groups with a sliding window keep only
 * the ends of chains, so what is held of one begins behind its first block.
 */
import type { HashKey } from '@kvtier/identity';
import type { Holdings, LookupResult, Store } from '@kvtier/store';

/** As `Store.lookup`, with a span of tier '' for every gap. */
export function lookupAll(store: Store, state: Holdings['state'], hashes: readonly HashKey[]): LookupResult {
  const spans: { tier: string; count: number }[] = [];
  let held = 0;
  let estimatedUs = 0;
  // From the tail on: a lookup is a use, and parents must end up at least as recent as their children.
  for (let i = hashes.length - 1; i >= 0; i--) {
    const one = store.lookup(state, [hashes[i]!]);
    const tier = one.spans[0]?.tier ?? '';
    held += one.held;
    estimatedUs += one.estimatedUs;
    const first = spans[0];
    if (first?.tier === tier) first.count++;
    else spans.unshift({ tier, count: 1 });
  }
  return { held, spans, estimatedUs };
}
