/** LruPolicy against a naive list. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { createPolicy, LruPolicy } from './index.ts';

/** The oracle: an array, coldest first. */
class NaiveLru {
  order: number[] = [];
  insert(entry: number, parent?: number): void {
    const at = parent === undefined ? -1 : this.order.indexOf(parent);
    if (at === -1) this.order.push(entry);
    else this.order.splice(at, 0, entry);
  }
  touch(entry: number): void {
    this.remove(entry);
    this.order.push(entry);
  }
  remove(entry: number): void {
    this.order.splice(this.order.indexOf(entry), 1);
  }
}

describe('LruPolicy', () => {
  it('equals a naive list on random operations', () => {
    const operation = fc.record({
      kind: fc.constantFrom('insert', 'insertBehind', 'touch', 'remove'),
      entry: fc.nat(200),
      other: fc.nat(200),
    });
    fc.assert(
      fc.property(fc.array(operation, { maxLength: 300 }), fc.nat(7), (operations, pinned) => {
        const policy = new LruPolicy();
        const naive = new NaiveLru();
        for (const [nowUs, { kind, entry, other }] of operations.entries()) {
          const held = naive.order.includes(entry);
          expect(policy.has(entry)).toBe(held);
          if (kind === 'insert' && !held) {
            policy.insert(entry, nowUs);
            naive.insert(entry);
          } else if (kind === 'insertBehind' && !held) {
            policy.insert(entry, nowUs, { parent: other });
            naive.insert(entry, other);
          } else if (kind === 'touch' && held) {
            policy.touch(entry, nowUs);
            naive.touch(entry);
          } else if (kind === 'remove' && held) {
            policy.remove(entry);
            naive.remove(entry);
          }
          policy.checkIntegrity();
          const mayEvict = (candidate: number): boolean => candidate % 8 !== pinned;
          expect(policy.victim(mayEvict)).toBe(naive.order.find(mayEvict));
        }
        expect([...policy.coldestFirst()]).toEqual(naive.order);
        expect(policy.count).toBe(naive.order.length);
      }),
    );
  });

  it('a chain inserted parent by parent is evicted from its tail', () => {
    const policy = createPolicy('lru');
    policy.insert(0, 0);
    policy.insert(1, 1, { parent: 0 });
    policy.insert(2, 2, { parent: 1 });
    policy.insert(9, 3);
    expect([...policy.coldestFirst()]).toEqual([2, 1, 0, 9]);
  });

  it('misuse is a defect, not a state', () => {
    const policy = new LruPolicy();
    policy.insert(3, 0);
    expect(() => policy.insert(3, 0)).toThrow('tracked already');
    expect(() => policy.touch(4, 0)).toThrow('not tracked');
    expect(() => policy.remove(4)).toThrow('not tracked');
    expect(() => policy.insert(-1, 0)).toThrow('not an entry');
  });
});
