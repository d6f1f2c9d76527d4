/**
 * Several nodes and one directory of Redis: whatever each of them writes, evicts, removes and lists, with replies and polls that
 * come late or not at all, in the end every node lists what the server has, block by block. Also where the server goes back to what
 * it was, while nodes list and write and their connections go on.
 */
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { chargeOf, Directory, RedisIndex } from '@kvtier/tiers/redis/testing';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { chainOf, spaces } from './contents.ts';
import { RedisKeys, type Reply } from './redis-keys.ts';

const [bytes, partBytes] = [1_000, 512];
const capacityBytes = 5 * chargeOf(bytes, partBytes);
const space = spaces[0]!.namespace;
const hashes: readonly HashKey[] = chainOf(1, 0, 0, 8);
const partition = { index: 0, base: 'kvtier:{p0}:', keys: ['kvtier:{p0}:ledger', 'b', 'r', 'l', 'e', 's'], slot: 0 };

const text = (argument: unknown): string =>
  Buffer.isBuffer(argument) ? argument.toString('latin1') : String(argument);

/** A node's connection: the server takes commands in their order, and replies come in that order, when it is said. */
class Connection {
  readonly #keys: RedisKeys;
  readonly #asked: (() => void)[] = [];
  readonly #answered: ((isLost: boolean) => void)[] = [];

  constructor(keys: RedisKeys) {
    this.#keys = keys;
  }

  run({ sha }: { sha: string }, { keys }: typeof partition, args: readonly unknown[]): Promise<Reply> {
    return this.command(partition, 'EVALSHA', [sha, keys.length, ...keys, ...args]);
  }

  command(_: unknown, name: string, args: readonly unknown[]): Promise<Reply> {
    return new Promise((resolve, reject) => {
      this.#asked.push(() => {
        const reply = this.#keys.run(name, args.map(text));
        this.#answered.push((isLost) => {
          if (isLost) reject(new KvError('IO', 'redis: no answer'));
          else if (reply instanceof Error) reject(new KvError('IO', `redis: ${reply.message}`));
          else resolve(reply);
        });
      });
    });
  }

  /** The server does the next command. false: there is none. */
  arrive(): boolean {
    const next = this.#asked.shift();
    next?.();
    return next !== undefined;
  }

  /** The next reply comes, or is lost. false: there is none. */
  deliver(isLost = false): boolean {
    const next = this.#answered.shift();
    next?.(isLost);
    return next !== undefined;
  }
}

const turn = (): Promise<void> => new Promise((resolve) => setImmediate(resolve));

class Node {
  readonly index = new RedisIndex();
  readonly connection: Connection;
  readonly directory: Directory;
  readonly #name: string;
  #next = 0;
  #isPolling = false;
  /** As in service.ts. */
  state: 'out' | 'listing' | 'in' = 'out';
  running = 0;

  constructor(keys: RedisKeys, name: string) {
    this.#name = name;
    this.connection = new Connection(keys);
    const commands = this.connection as unknown as ConstructorParameters<typeof Directory>[1];
    this.directory = new Directory(partition, commands, this.index, name);
  }

  /** What a tier does; a server that refuses or is silent ends it. */
  begin(act: () => Promise<unknown>): void {
    this.running++;
    const end = (): void => {
      this.running--;
    };
    act().then(end, (error: unknown) => {
      end();
      if (!(error instanceof KvError) || (error.code !== 'IO' && error.code !== 'CANCELLED')) throw error;
      if (error.message.includes('listed again') && this.state !== 'out') this.leave();
    });
  }

  leave(): void {
    this.state = 'out';
    this.directory.end();
    this.index.clear();
  }

  async open(): Promise<void> {
    this.state = 'listing';
    try {
      await this.directory.open(1, capacityBytes);
      await this.directory.list(() => {});
      await this.directory.poll();
      this.state = 'in';
    } catch (error) {
      this.leave();
      throw error;
    }
  }

  async relist(): Promise<void> {
    if (this.state === 'listing') return;
    this.leave();
    await this.open();
  }

  async write(wanted: readonly HashKey[], ttlMs: number | undefined): Promise<void> {
    const blocks = wanted
      .filter((hash) => this.index.get(space, hash) === undefined)
      .map((hash) => ({ hash, id: `${this.#name}.${this.#next++}`, bytes }));
    if (blocks.length === 0 || this.state !== 'in') return;
    const { answers } = await this.directory.reserve(space, blocks, { leaseMs: 1_000, partBytes, share: undefined });
    const roomy = blocks.filter((_, i) => answers[i] === 'done');
    if (roomy.length === 0) return;
    const written = roomy.map((block, i) => ({
      ...{ ...block, written: true, usedUs: 0 },
      ttlMs: i % 2 === 0 ? ttlMs : undefined,
    }));
    await this.directory.commit(space, written, partBytes);
  }

  async remove(hash: HashKey): Promise<void> {
    const entry = this.index.get(space, hash);
    if (entry === undefined) return;
    this.index.remove(space, hash);
    await this.directory.remove(space, [{ hash, text: entry.text }]);
  }

  /** One at a time, as in service.ts; where it is out of service, it lists anew. */
  async poll(): Promise<void> {
    if (this.state === 'out') await this.open();
    if (this.#isPolling || this.state !== 'in') return;
    this.#isPolling = true;
    await this.directory.poll().finally(() => {
      this.#isPolling = false;
    });
  }
}

type Step =
  | {
      readonly does: 'write';
      readonly node: number;
      readonly from: number;
      readonly count: number;
      readonly ttlMs?: number;
    }
  | { readonly does: 'remove'; readonly node: number; readonly from: number }
  | { readonly does: 'poll' | 'arrive' | 'deliver' | 'lose' | 'relist' | 'finish'; readonly node: number }
  | { readonly does: 'advance'; readonly node: number; readonly count: number }
  | { readonly does: 'refuse' | 'wait' | 'replicate' | 'go back' };

const node = fc.nat({ max: 2 });
const from = fc.nat({ max: hashes.length - 1 });
const ttlMs = fc.constantFrom(undefined, 20);
const steps: readonly fc.WeightedArbitrary<Step>[] = [
  {
    weight: 3,
    arbitrary: fc.record({
      does: fc.constant('write' as const),
      node,
      from,
      count: fc.integer({ min: 1, max: 3 }),
      ttlMs,
    }) as fc.Arbitrary<Step>,
  },
  { weight: 1, arbitrary: fc.record({ does: fc.constant('remove' as const), node, from }) },
  { weight: 2, arbitrary: fc.record({ does: fc.constant('poll' as const), node }) },
  { weight: 8, arbitrary: fc.record({ does: fc.constantFrom('arrive' as const, 'deliver' as const), node }) },
  { weight: 1, arbitrary: fc.record({ does: fc.constantFrom('lose' as const), node }) },
  { weight: 1, arbitrary: fc.record({ does: fc.constantFrom('refuse' as const, 'wait' as const) }) },
];
const anyStep = fc.array(fc.oneof(...steps), { minLength: 10, maxLength: 80 });

const advance = fc.record({ does: fc.constant('advance' as const), node: fc.constant(1), count: fc.nat({ max: 7 }) });
/** To its end. */
const whole = (drawn: fc.Arbitrary<Step & { readonly node: number }>): fc.Arbitrary<Step[]> =>
  drawn.map((each) => [each, { does: 'finish', node: each.node }]);
const writes = whole(
  fc.record({
    does: fc.constant('write' as const),
    node: fc.constantFrom(0, 2),
    from,
    count: fc.integer({ min: 1, max: 3 }),
  }),
);
const polls = whole(fc.record({ does: fc.constant('poll' as const), node: fc.constantFrom(0, 2) }));
/** While one node lists, others write, the server goes back, and they write again. */
const undoneListing = fc
  .tuple(
    ...[writes, fc.constant<Step[]>([{ does: 'replicate' }, { does: 'relist', node: 1 }])],
    ...[advance.map((each) => [each]), writes, advance.map((each) => [each])],
    ...[fc.constant<Step[]>([{ does: 'go back' }]), polls, polls, writes, writes, advance.map((each) => [each])],
    fc.array(fc.oneof(...steps), { maxLength: 5 }),
  )
  .map((parts) => parts.flat() as Step[]);

async function settle(nodes: readonly Node[]): Promise<void> {
  for (let moved = true; moved; await turn()) {
    moved = false;
    for (const { connection } of nodes) {
      while (connection.arrive()) moved = true;
      while (connection.deliver()) moved = true;
    }
  }
}

it.each([
  ['every node comes to list what the server has', anyStep, 400, false],
  ['also after a failover to older data', undoneListing, 150, true],
] as const)('%s', async (_, possible, numRuns, mayRelist) => {
  await fc.assert(
    fc.asyncProperty(possible, async (drawn) => {
      let nowUs = 1e12;
      let refuses = false;
      const keys = new RedisKeys(
        () => nowUs++,
        () => refuses,
      );
      const nodes = ['a', 'b', 'c'].map((name) => new Node(keys, name));
      for (const each of nodes) {
        each.begin(() => each.open());
        await settle(nodes);
      }
      let replica = keys.copy();
      for (const each of drawn) {
        if (each.does === 'refuse') refuses = !refuses;
        else if (each.does === 'replicate') replica = keys.copy();
        else if (each.does === 'go back') {
          keys.restore(replica);
          replica = keys.copy();
        } else if (each.does === 'wait') nowUs += 30_000;
        else if ('node' in each) {
          const at = nodes[each.node]!;
          if (each.does === 'write')
            at.begin(() => at.write(hashes.slice(each.from, each.from + each.count), each.ttlMs));
          else if (each.does === 'remove') at.begin(() => at.remove(hashes[each.from]!));
          else if (each.does === 'poll') at.begin(() => at.poll());
          else if (each.does === 'arrive') at.connection.arrive();
          else if (each.does === 'finish') await settle([at]);
          else if (each.does === 'relist') at.begin(() => at.relist());
          else if (each.does === 'advance') {
            for (let left = each.count; left > 0; left--, await turn()) {
              at.connection.arrive();
              at.connection.deliver();
            }
          } else at.connection.deliver(each.does === 'lose');
        }
        await turn();
      }
      refuses = false;
      nowUs += 10e6;
      await settle(nodes);
      for (let round = 0; round < 3; round++) {
        for (const each of nodes) {
          expect(mayRelist || each.state === 'in').toBe(true);
          each.begin(() => each.poll());
          await settle(nodes);
        }
      }
      const held = [...keys.ledger!.blocks].map(([name, entry]) => [name.slice(32), entry]).sort();
      for (const { index, running, state } of nodes) {
        expect(state).toBe('in');
        const listed = hashes.flatMap((hash) => {
          const entry = index.get(space, hash);
          return entry === undefined ? [] : [[hash, entry.text]];
        });
        expect(listed.sort()).toEqual(held);
        expect(running).toBe(0);
      }
    }),
    { numRuns },
  );
});
