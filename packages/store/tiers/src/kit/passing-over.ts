/**
 * The coldest block that may go, among many that may not.
 *
 * Blocks that are kept for long (pins last minutes) are not used meanwhile, so that in the end all of them are colder than any other;
 * passed over at each allocation, thousands of them would make it as slow. So many are passed over once: where a touch makes a block the
 * warmest, they are touched; elsewhere their owner parks them, until they may go. So what is passed over adds up to no more than what is
 * kept and what is allocated.
 */
import type { EntryIndex, EvictionPolicy } from '@kvtier/eviction';

/** Reads in flight are fewer, mostly: these keep their place. */
export const manyPassed = 64;
/** So many are told of at one time: parking them takes some milliseconds. The others are passed over once more. */
export const mostPassed = 4096;
/** So often one who finds that nothing may go asks for room: what others have let go may be far more than it needs. */
export const roomAsks = 4;
/** Policies under which a touch makes a block warmer than those that were touched before. */
const ordersByUse: ReadonlySet<EvictionPolicy['name']> = new Set(['lru', 'lfu']);
/** These do not look at it. */
const noTime = 0;

export interface PassingOver {
  readonly mayGo: (index: EntryIndex) => boolean;
  /** So many keep their place; default: `manyPassed`. */
  readonly mayPass?: number | undefined;
  /** Under a policy where no touch helps: what was passed over, few or many, up to `mostPassed` of them. */
  readonly onPassed?: (passed: ReadonlySet<EntryIndex>) => void;
}

/** The victim of `policy`; it stays in its order. */
export function victimPassingOver(
  policy: Pick<EvictionPolicy, 'name' | 'victim' | 'touch'>,
  options: PassingOver,
): EntryIndex | undefined {
  const { mayGo, mayPass = manyPassed, onPassed } = options;
  const isTouched = ordersByUse.has(policy.name);
  const most = isTouched ? Number.POSITIVE_INFINITY : Math.max(mostPassed, mayPass + 1); // touched in parts, a kept chain would lose its order
  const passed = new Set<EntryIndex>();
  const victim = policy.victim((index) => {
    if (mayGo(index)) return true;
    if (passed.size < most) passed.add(index); // a policy may ask about one again
    return false;
  });
  if (!isTouched) {
    if (passed.size > 0) onPassed?.(passed);
  } else if (passed.size > mayPass) for (const index of passed) policy.touch(index, noTime);
  return victim;
}
