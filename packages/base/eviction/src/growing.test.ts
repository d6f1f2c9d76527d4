/** Chains that grow side by side for longer than all entries are exchanged: no walk for a victim is long. */
import { expect, it, vi } from 'vitest';
import { EntryLists } from './entry-lists.ts';
import { createPolicy } from './index.ts';

const [count, chains, parts] = [20_000, 16, 16];

it.each(['fifo', 's3-fifo'] as const)('%s', (kind) => {
  const policy = createPolicy(kind);
  const looks = [vi.spyOn(EntryLists.prototype, 'coldest'), vi.spyOn(EntryLists.prototype, 'warmer')];
  const begun = (at: number) => ({ entries: [] as number[], placed: at, told: at });
  const growing = Array.from({ length: chains }, () => begun(0));
  const chainOf: ReturnType<typeof begun>[] = [];
  let most = 0;
  for (let made = 0; made < 4 * count; made++) {
    let entry = made;
    if (made >= count) {
      for (const look of looks) look.mockClear();
      entry = policy.victim(() => true)!;
      most = Math.max(most, looks[0]!.mock.calls.length + looks[1]!.mock.calls.length);
      policy.remove(entry);
      expect(chainOf[entry]!.entries.pop()).toBe(entry); // the end of its chain
    }
    // One after the other ends, and another one begins in its place.
    if (made % 1_250 === 0) growing[(made / 1_250) % chains] = begun(made);
    const chain = growing[made % chains]!;
    const parent = chain.entries.at(-1);
    if (made - chain.told >= count / parts) {
      for (const one of chain.entries.toReversed()) policy.refresh(one);
      chain.told = made;
    }
    const comesLate = parent !== undefined && made - chain.placed > count / parts;
    policy.insert(entry, 0, { parent, comesLate });
    if (parent === undefined || comesLate) chain.placed = made;
    chain.entries.push(entry);
    chainOf[entry] = chain;
  }
  policy.checkIntegrity();
  expect(most).toBeLessThan(16);
});
