/** Every policy: against a naive model of itself, as a map of entries, and on chains. */
import fc from 'fast-check';
import { describe, expect, it, vi } from 'vitest';
import { ChainParents } from './chain-parents.ts';
import { mostKept } from './chain-queues.ts';
import { EntryLists } from './entry-lists.ts';
import { FifoPolicy } from './fifo.ts';
import { createPolicy, type EvictionPolicy, type PolicyName, policyNames } from './index.ts';
import { S3FifoPolicy } from './s3-fifo.ts';

/** The oracles sort plain records; `order` is when an entry came to its place, fractions put a child before its parent. */
interface Naive {
  readonly entry: number;
  list: 'small' | 'main';
  order: number;
  /** Of lfu, from 1 on. */
  uses: number;
  /** Of lfu: uses, and the age when it was used last. */
  rank: number;
  name: number | undefined;
  parent: Naive | undefined;
  /** It was refreshed, and has children since. */
  isAside: boolean;
}

class Oracle {
  readonly kind: PolicyName;
  /** Of s3-fifo, in one walk over one of its queues. */
  readonly #mostMoves: number;
  items: Naive[] = [];
  ghosts: number[] = [];
  #clock = 0;
  /** Of lfu: the rank of what was evicted last. */
  #age = 0;
  constructor(kind: PolicyName, mostMoves = Number.POSITIVE_INFINITY) {
    this.kind = kind;
    this.#mostMoves = mostMoves;
  }
  find(entry: number): Naive | undefined {
    return this.items.find((item) => item.entry === entry);
  }
  #group(item: Naive): string {
    return this.kind === 'lfu' ? String(item.rank) : item.list;
  }
  #sorted(): Naive[] {
    return [...this.items].sort((a, b) =>
      this.kind === 'lfu' && a.rank !== b.rank ? a.rank - b.rank : a.order - b.order,
    );
  }
  insert(entry: number, parent: number | undefined, name: number | undefined, asksLate = false): void {
    const comesLate = asksLate && this.#isByArrival;
    const returns = this.kind === 's3-fifo' && name !== undefined && this.ghosts.includes(name);
    const item: Naive = {
      entry,
      list: returns ? 'main' : 'small',
      order: ++this.#clock,
      uses: this.kind === 'lfu' ? 1 : 0,
      rank: this.#age + 1,
      name,
      parent: undefined,
      isAside: false,
    };
    const above = parent === undefined ? undefined : this.find(parent);
    item.parent = above;
    const besides =
      above !== undefined &&
      !comesLate &&
      !above.isAside &&
      (this.kind === 'lfu'
        ? above.rank <= this.#age + 1
        : this.kind !== 's3-fifo' || above.list === 'small' || returns);
    if (besides) {
      item.list = above.list;
      item.rank = above.rank;
      const colder = this.items.filter((one) => this.#group(one) === this.#group(above) && one.order < above.order);
      item.order = (Math.max(above.order - 1, ...colder.map(({ order }) => order)) + above.order) / 2;
    }
    this.ghosts = this.ghosts.filter((ghost) => !returns || ghost !== name);
    this.items.push(item);
  }
  get #isByArrival(): boolean {
    return this.kind === 'fifo' || this.kind === 's3-fifo';
  }
  refresh(entry: number): void {
    const item = this.find(entry)!;
    item.rank = this.#age + item.uses;
    if (!this.#isByArrival) item.order = ++this.#clock;
    else item.isAside ||= this.items.some(({ parent }) => parent === item);
  }
  touch(entry: number): void {
    const item = this.find(entry)!;
    item.uses = Math.min(item.uses + 1, this.kind === 's3-fifo' ? 3 : 255);
    item.rank = this.#age + item.uses;
    if (this.kind === 'lru' || this.kind === 'lfu') item.order = ++this.#clock;
  }
  remove(entry: number, evicted = false): void {
    const { list, name, parent: above, rank } = this.find(entry)!;
    if (evicted) this.#age = Math.max(this.#age, rank);
    this.items = this.items.filter((item) => item.entry !== entry);
    if (above?.isAside && !this.items.some(({ parent }) => parent === above)) {
      above.isAside = false;
      above.order = Math.min(...this.items.map(({ order }) => order)) - 1;
    }
    if (evicted && this.kind === 's3-fifo' && list === 'small' && name !== undefined) {
      this.ghosts = [...this.ghosts.filter((ghost) => ghost !== name), name];
    }
    this.ghosts = this.ghosts.slice(-Math.max(1, this.items.length));
  }
  victim(mayEvict: (entry: number) => boolean): number | undefined {
    const leaf = (entry: number): boolean =>
      mayEvict(entry) && !this.items.some(({ parent }) => parent === this.find(entry));
    if (this.kind === 'fifo') return this.#sorted().find(({ entry }) => leaf(entry))?.entry;
    if (this.kind !== 's3-fifo') return this.#sorted().find(({ entry }) => mayEvict(entry))?.entry;
    const smallCount = (): number => this.items.filter(({ list }) => list === 'small').length;
    let found = smallCount() * 10 >= this.items.length ? undefined : this.#fromMain(leaf);
    // What has come from small to main is asked about there; and what a walk has left in small, when nothing else may go.
    for (let promoted = this.#mostMoves; found === undefined && promoted >= this.#mostMoves; ) {
      const before = smallCount();
      found = this.#fromSmall(leaf);
      promoted = before - smallCount();
      found ??= this.#fromMain(leaf);
    }
    return found;
  }
  #fromSmall(mayEvict: (entry: number) => boolean): number | undefined {
    let moves = 0;
    for (const item of this.#sorted().filter(({ list }) => list === 'small')) {
      if (item.uses >= 2 && moves++ === this.#mostMoves) return undefined;
      if (item.uses >= 2) Object.assign(item, { list: 'main', uses: 0, order: ++this.#clock });
      else if (mayEvict(item.entry)) return item.entry;
    }
    return undefined;
  }
  #fromMain(mayEvict: (entry: number) => boolean): number | undefined {
    let moves = 0;
    for (let round = 0; round < 4; round++) {
      for (const item of this.#sorted().filter(({ list }) => list === 'main')) {
        if (!mayEvict(item.entry)) continue;
        // Nobody waits for a step for each entry: then the coldest goes, used or not.
        if (item.uses === 0 || moves++ === this.#mostMoves) return item.entry;
        item.uses--;
        item.order = ++this.#clock;
      }
    }
    return undefined;
  }
}

interface Linked {
  readonly entry: number;
  readonly parent: Linked | undefined;
}

/** Those that may go and have children of which none may, nor anything that follows these. */
function beforeKept(items: readonly Linked[], mayGo: (entry: number) => boolean): number[] {
  const childrenOf = (one: Linked): Linked[] => items.filter(({ parent }) => parent === one);
  const isKept = (one: Linked): boolean => !mayGo(one.entry) && childrenOf(one).every(isKept);
  const isBefore = (one: Linked): boolean => childrenOf(one).length > 0 && childrenOf(one).every(isKept);
  return items.filter((one) => mayGo(one.entry) && isBefore(one)).map(({ entry }) => entry);
}

const operation = fc.record({
  kind: fc.constantFrom(
    'insert',
    'insert',
    'child',
    'late child',
    'touch',
    'touch',
    'refresh',
    'remove',
    'evict',
    'evict',
  ),
  entry: fc.nat(60),
  other: fc.nat(60),
  name: fc.option(fc.nat(20), { nil: undefined }),
});

const kinds = policyNames.map((kind) => [kind, kind, () => createPolicy(kind), undefined] as const);
const ofShortWalks = ['s3-fifo of short walks', 's3-fifo', () => new S3FifoPolicy(undefined, 2), 2] as const;

describe.each([...kinds, ofShortWalks])('%s', (_, kind, make, mostMoves) => {
  it('equals its naive model on random operations', () => {
    fc.assert(
      fc.property(fc.array(operation, { maxLength: 200 }), fc.nat(7), (operations, pinned) => {
        const policy: EvictionPolicy = make();
        const oracle = new Oracle(kind, mostMoves);
        for (const { kind: act, entry, other, name } of operations) {
          const held = oracle.find(entry) !== undefined;
          expect(policy.has(entry)).toBe(held);
          const comesLate = act === 'late child';
          if ((act === 'insert' || act === 'child' || comesLate) && !held) {
            const parent = act === 'insert' ? undefined : other;
            policy.insert(entry, 0, { parent, name, comesLate });
            oracle.insert(entry, parent, name, comesLate);
          } else if (act === 'refresh' && held) {
            policy.refresh(entry);
            oracle.refresh(entry);
          } else if (act === 'touch' && held) {
            policy.touch(entry, 0);
            oracle.touch(entry);
          } else if (act === 'remove' && held) {
            // As an owner does that does not evict: another victim was chosen since, or none.
            policy.victim(() => false);
            oracle.victim(() => false);
            policy.remove(entry);
            oracle.remove(entry);
          } else if (act === 'evict') {
            const mayEvict = (candidate: number): boolean => candidate % 8 !== pinned;
            const victim = policy.victim(mayEvict);
            const expected = oracle.victim(mayEvict);
            const instead = kind === 'fifo' || kind === 's3-fifo' ? beforeKept(oracle.items, mayEvict) : [];
            if (expected === undefined && instead.length > 0) expect(instead).toContain(victim);
            else expect(victim).toBe(expected);
            if (victim !== undefined) {
              policy.remove(victim);
              oracle.remove(victim, true);
            }
          }
          policy.checkIntegrity();
          expect(policy.count).toBe(oracle.items.length);
        }
        const foretold = [...policy.coldestFirst()];
        const happened = foretold.map(() => {
          const victim = policy.victim(() => true)!;
          policy.remove(victim);
          return victim;
        });
        expect(foretold).toEqual(happened);
        expect(policy.count).toBe(0);
      }),
      { numRuns: 300 },
    );
  });

  it('evicts children before their parents, however chains are used', () => {
    const step = fc.record({ chain: fc.nat(5), length: fc.integer({ min: 1, max: 8 }) });
    fc.assert(
      fc.property(fc.array(step, { maxLength: 60 }), (steps) => {
        const policy: EvictionPolicy = make();
        const entryOf = (chain: number, at: number): number => chain * 8 + at;
        for (const { chain, length } of steps) {
          // As the tiers do: use what is there, children first, then append what is not.
          for (let at = length - 1; at >= 0; at--) {
            if (policy.has(entryOf(chain, at))) policy.touch(entryOf(chain, at), 0);
          }
          for (let at = 0; at < length; at++) {
            if (policy.has(entryOf(chain, at))) continue;
            const parent = at === 0 ? undefined : entryOf(chain, at - 1);
            policy.insert(entryOf(chain, at), 0, { parent, name: entryOf(chain, at) });
          }
          if (policy.count > 24) evict(policy);
        }
        while (policy.count > 0) evict(policy);
      }),
    );
    function evict(policy: EvictionPolicy): void {
      const victim = policy.victim(() => true)!;
      policy.remove(victim);
      if (victim % 8 < 7) expect(policy.has(victim + 1), `${victim} went before its child`).toBe(false);
    }
  });

  it('misuse is a defect, not a state', () => {
    const policy = createPolicy(kind);
    policy.insert(3, 0);
    expect(() => policy.insert(3, 0)).toThrow(`${kind}: entry 3 is tracked already`);
    expect(() => policy.touch(4, 0)).toThrow(`${kind}: entry 4 is not tracked`);
    expect(() => policy.remove(4)).toThrow(`${kind}: entry 4 is not tracked`);
    expect(() => policy.insert(-1, 0)).toThrow(`${kind}: -1 is not an entry`);
  });
});

const made: Record<'fifo' | 's3-fifo', (mayPass: number, most?: number) => EvictionPolicy> = {
  fifo: (mayPass) => new FifoPolicy(mayPass),
  's3-fifo': (mayPass, most) => new S3FifoPolicy(mayPass, most),
};

describe.each(['fifo', 's3-fifo'] as const)('%s with parked entries', (kind) => {
  it('chooses no parked one, and none before a child that may go, however many stand aside', () => {
    interface Known extends Linked {
      readonly parent: Known | undefined;
      isParked: boolean;
    }
    const step = fc.record({
      kind: fc.constantFrom('insert', 'child', 'child', 'touch', 'remove', 'evict', 'evict', 'park', 'park', 'unpark'),
      entry: fc.nat(40),
      other: fc.nat(40),
      name: fc.option(fc.nat(20), { nil: undefined }),
    });
    fc.assert(
      fc.property(fc.array(step, { maxLength: 200 }), fc.nat(7), fc.nat(7), (steps, pinned, bounds) => {
        const mayPass = bounds % 4;
        const policy: EvictionPolicy = made[kind](mayPass, bounds < 4 ? undefined : mayPass + 1);
        const known = new Map<number, Known>();
        const all = (): Known[] => [...known.values()];
        const isParent = (one: Known): boolean => all().some(({ parent }) => parent === one);
        for (const { kind: act, entry, other, name } of steps) {
          const one = known.get(entry);
          if ((act === 'insert' || act === 'child') && one === undefined) {
            const parent = act === 'child' ? known.get(other) : undefined;
            policy.insert(entry, 0, { parent: act === 'child' ? other : undefined, name });
            known.set(entry, { entry, parent, isParked: false });
          } else if (act === 'touch' && one !== undefined) policy.touch(entry, 0);
          else if (act === 'remove' && one !== undefined) {
            policy.remove(entry);
            known.delete(entry);
          } else if (act === 'park' && one?.isParked === false) {
            policy.park!(entry);
            one.isParked = true;
          } else if (act === 'unpark' && one?.isParked) {
            policy.unpark!(entry);
            one.isParked = false;
          } else if (act === 'evict') {
            const mayGo = all().filter((each) => each.entry % 8 !== pinned && !each.isParked && !isParent(each));
            const victim = policy.victim((candidate) => {
              expect(known.get(candidate)!.isParked).toBe(false);
              return candidate % 8 !== pinned;
            });
            const first = mayGo.map((each) => each.entry);
            const isFree = (at: number): boolean => at % 8 !== pinned && !known.get(at)!.isParked;
            const among = first.length > 0 ? first : beforeKept(all(), isFree);
            if (victim === undefined) expect(among).toEqual([]);
            else {
              expect(among).toContain(victim);
              policy.remove(victim);
              known.delete(victim);
            }
          }
          policy.checkIntegrity();
          expect(policy.count).toBe(known.size);
        }
        const foretold = [...policy.coldestFirst()];
        const happened: number[] = [];
        for (let next = policy.victim(() => true); next !== undefined; next = policy.victim(() => true)) {
          policy.remove(next);
          happened.push(next);
        }
        expect(foretold).toEqual(happened);
        expect(policy.count).toBe(all().filter(({ isParked }) => isParked).length);
      }),
      { numRuns: 1_000 },
    );
  });

  it.each([
    ['few', 10, 600, false],
    ['many', 100, 60, true],
  ])('%s kept ends of chains keep nothing but themselves, and cost no walk each time', (_, chains, length, parks) => {
    const policy = createPolicy(kind);
    for (let at = 0; at < chains * length; at++) {
      policy.insert(at, 0, { parent: at % length === 0 ? undefined : at - 1 });
    }
    for (let at = chains * length; at < chains * length + 1_000; at++) policy.insert(at, 0);
    const isEnd = (entry: number): boolean => entry < chains * length && entry % length === length - 1;
    if (parks) for (let at = length - 1; at < chains * length; at += length) policy.park!(at);
    const walk = vi.spyOn(EntryLists.prototype, 'warmer');
    const order: number[] = [];
    const evict = (): void => {
      const victim = policy.victim((entry) => !isEnd(entry))!;
      policy.remove(victim);
      order.push(victim);
    };
    evict();
    expect(walk.mock.calls.length).toBeGreaterThan(chains * (length - 2)); // once
    walk.mockClear();
    for (let round = 1; round < 1_000; round++) evict();
    expect(order.every((entry) => entry >= chains * length)).toBe(true);
    for (let round = 0; round < chains * (length - 1); round++) evict();
    expect(policy.victim((entry) => !isEnd(entry))).toBeUndefined();
    expect(policy.count).toBe(chains);
    for (const [at, entry] of order.entries()) {
      // Each chain from its end on.
      if (at > 1_000 && order[at - 1]! % length > 0) expect(entry).toBe(order[at - 1]! - 1);
    }
    // A few parents and kept ones keep their place; s3-fifo goes around up to five times where nothing childless may go.
    expect(walk.mock.calls.length).toBeLessThan(order.length * 6 * (64 + (parks ? 0 : chains)));
    policy.checkIntegrity();
    walk.mockRestore();
  });

  it('misuse of parking is a defect', () => {
    const policy = createPolicy(kind);
    policy.insert(3, 0);
    expect(() => policy.unpark!(3)).toThrow(`${kind}: entry 3 is not parked`);
    policy.park!(3);
    expect(() => policy.park!(3)).toThrow(`${kind}: entry 3 is parked already`);
    expect(() => policy.park!(4)).toThrow(`${kind}: entry 4 is not tracked`);
    expect([policy.victim(() => true), policy.count]).toEqual([undefined, 1]);
  });
});

it('s3-fifo keeps what is used through a scan, where lru does not', () => {
  const survivors = (policy: EvictionPolicy): number => {
    const held = new Map<number, number>(); // name -> entry
    const free = Array.from({ length: 100 }, (_, i) => i);
    const use = (name: number): void => {
      const entry = held.get(name);
      if (entry !== undefined) {
        policy.touch(entry, 0);
        return;
      }
      if (free.length === 0) {
        const victim = policy.victim(() => true)!;
        policy.remove(victim);
        for (const [other, at] of held) if (at === victim) held.delete(other);
        free.push(victim);
      }
      const taken = free.pop()!;
      held.set(name, taken);
      policy.insert(taken, 0, { name });
    };
    for (let round = 0; round < 4; round++) for (let name = 0; name < 50; name++) use(name);
    for (let name = 1000; name < 2000; name++) use(name);
    return [...held.keys()].filter((name) => name < 50).length;
  };
  expect(survivors(new S3FifoPolicy())).toBe(50);
  expect(survivors(createPolicy('lru'))).toBe(0);
});

describe.each(['fifo', 's3-fifo'] as const)('%s, of many', (kind) => {
  const count = 20_000;

  it('tells the first few that would go without a step for each, also where some stand aside', () => {
    const policy = createPolicy(kind);
    for (let at = 0; at < count; at++) policy.insert(at, 0, { parent: at % 100 === 0 ? undefined : at - 1 });
    policy.park!(count - 1);
    policy.remove(policy.victim(() => true)!);
    const steps = vi.spyOn(EntryLists.prototype, 'append');
    const first: number[] = [];
    for (const entry of policy.coldestFirst()) if (first.push(entry) === 3) break;
    expect([first, steps.mock.calls.length]).toEqual([[98, 97, 96], 0]);
    steps.mockRestore();
  });

  it('in use climbs so far for a parent that may go, and no further', () => {
    const policy = createPolicy(kind);
    for (let at = 0; at < count; at++) policy.insert(at, 0, { parent: at % 1_000 === 0 ? undefined : at - 1 });
    policy.victim(() => false); // puts parents aside
    const steps = vi.spyOn(ChainParents.prototype, 'parentOf');
    expect(policy.victim(() => false)).toBeUndefined();
    expect(steps.mock.calls.length).toBeLessThanOrEqual(mostKept);
    steps.mockRestore();
  });

  it('lets no parent go before a child that may not go now and is not in use', () => {
    const policy = createPolicy(kind);
    policy.insert(0, 0);
    policy.insert(1, 0, { parent: 0 });
    policy.insert(2, 0, { parent: 1 });
    const mayGo = (entry: number): boolean => entry !== 2;
    expect([policy.victim(mayGo, () => false), policy.victim(mayGo, () => true)]).toEqual([undefined, 1]);
  });
});

it('s3-fifo finds a victim without a step for each entry where all are used, and each of them in the end', () => {
  const count = 20_000;
  const policy = new S3FifoPolicy();
  for (let at = 0; at < count; at++) policy.insert(at, 0, { parent: at % 50 === 0 ? undefined : at - 1 });
  const moves = vi.spyOn(EntryLists.prototype, 'append');
  let most = 0;
  for (let left = count; left > 0; left--) {
    if (left % 5_000 === 0)
      for (let at = 0; at < count; at++) if (policy.has(at)) for (let use = 0; use < 3; use++) policy.touch(at, 0);
    moves.mockClear();
    const victim = policy.victim(() => true)!;
    most = Math.max(most, moves.mock.calls.length);
    policy.remove(victim);
    if (victim % 50 < 49) expect(policy.has(victim + 1), `${victim} went before its child`).toBe(false);
  }
  moves.mockRestore();
  expect(most).toBeLessThanOrEqual(2 * 4_096 + 50);
  expect(policy.count).toBe(0);
});

it('s3-fifo finds what it has just brought to main', () => {
  const policy = new S3FifoPolicy();
  const use = (entry: number): void => {
    policy.touch(entry, 0);
    policy.touch(entry, 0);
  };
  for (let entry = 0; entry < 40; entry++) {
    policy.insert(entry, 0);
    use(entry);
  }
  policy.victim(() => false); // all of them to main
  policy.insert(50, 0);
  use(50);
  expect(policy.victim((entry) => entry === 50)).toBe(50);
});
