/**
 * The coldest block that nobody keeps. Blocks that are kept for long (pins last minutes) are not used meanwhile, so that in the end all of
 * them are colder than any other; passed over at each allocation, thousands of them would make it as slow. So many are the warmest again
 * once they were passed: what is passed over adds up to no more than what is allocated.
 */
import type { EntryIndex, EvictionPolicy } from '@kvtier/eviction';

/** Reads in flight are fewer, mostly: these keep their place. */
const manyPassed = 64;

export function idleVictim<E>(
  { policy, entries }: { readonly policy: Pick<EvictionPolicy, 'victim' | 'touch'>; readonly entries: readonly E[] },
  isIdle: (entry: NonNullable<E>) => boolean,
  nowUs: number,
): NonNullable<E> | undefined {
  const passed: EntryIndex[] = [];
  const victim = policy.victim((index) => {
    if (isIdle(entries[index]!)) return true;
    passed.push(index);
    return false;
  });
  if (passed.length > manyPassed) for (const index of passed) policy.touch(index, nowUs);
  return victim === undefined ? undefined : entries[victim]!;
}
