/** Which prompts the node is asked about: none that its table of held blocks answers, and all that may lie in another tier than peers'. */
import { KvError } from '@kvtier/errors';
import { LoadPlanner } from '@kvtier/load-planner';
import type { ByTier } from '@kvtier/scheduler';
import { expect, it } from 'vitest';
import { newCounters } from './counters.ts';
import { MatchTable } from './matches.ts';
import type { Session } from './session-client.ts';
import { ManualTimers } from './testing/manual-timers.ts';

const hashBytes = 8;
const blocks = 40;
/** Block n's hash begins with n. */
const hashes = Buffer.concat(Array.from({ length: blocks }, (_, block) => Buffer.from([block, 0, 0, 0, 0, 0, 0, 0])));
const [nowhere, away, near, arena] = [0, 2, 3, 7];

class Rig {
  readonly timers = new ManualTimers();
  readonly counters = newCounters();
  readonly planner = new LoadPlanner(16, 5_000);
  readonly table: MatchTable;
  readonly session: Session;
  /** Of each lookup, the first block. */
  readonly asked: number[] = [];
  flagsOf: (block: number) => number | undefined = () => away;
  /** The same by a block's first two bytes. */
  flagsAt: (block: number) => number | undefined = (block) => this.flagsOf(block & 0xff);
  usPerBlock = 1_000;
  /** No answer comes before this. */
  answers: Promise<void> | undefined;
  /** Default: all that were asked for. */
  heldBlocks: number | undefined;
  /** What was rather computed. */
  readonly passed: ByTier[] = [];

  constructor(windows = [Number.POSITIVE_INFINITY], hasTable = true) {
    this.table = new MatchTable({
      ...{ windows, hashBytes, lookupDeadlineMs: 100, planner: this.planner, timers: this.timers },
      ...{ counters: this.counters, onWake: () => {}, onPassed: (byTier) => this.passed.push(byTier) },
    });
    const call = async ({ value }: { value: { hashes: Buffer } }) => {
      this.asked.push(value.hashes[0]!);
      await this.answers;
      const count = this.heldBlocks ?? value.hashes.length / hashBytes;
      return { held: count, spans: [{ tier: 'peer', count }], estimatedUs: count * this.usPerBlock };
    };
    const held = {
      flags: (of: Buffer, at: number) => this.flagsAt(of.readUInt16LE(at)),
      flagsOfAll: (of: Buffer, bytes: number, count: number) => {
        const all = Array.from({ length: count }, (_, block) => this.flagsAt(of.readUInt16LE(block * bytes)));
        return all.includes(undefined) ? undefined : Uint8Array.from(all as number[]);
      },
    };
    this.session = { link: { call }, held: hasTable ? held : null } as unknown as Session;
    // 100 us a block
    for (let at = 0; at < 4; at++) this.planner.observePrefill(640, (640 * 641) / 2, 4_000);
  }

  async match(id: string, localBlocks = 0, of = hashes) {
    const sessions = this.#sessions();
    const match = this.table.match(sessions, id, of, localBlocks);
    if (match.state === 'known') return match.blocks;
    await new Promise(setImmediate);
    const known = this.table.match(sessions, id, of, localBlocks);
    return known.state === 'known' ? known.blocks : undefined;
  }

  #sessions(): Session[] {
    return [this.session];
  }
}

it('what nobody holds is known at once', async () => {
  const rig = new Rig();
  rig.flagsOf = (block) => (block === 0 ? nowhere : near);
  expect(rig.table.match([rig.session], 'r', hashes, 0)).toEqual({ state: 'known', blocks: 0 });
  expect(await rig.match('s')).toBe(0);
  expect(rig.asked).toEqual([]);
  expect(rig.counters).toMatchObject({ unasked: 2, lookups: 0 });
  rig.flagsOf = () => near;
  expect(await rig.match('r')).toBe(0); // remembered for a while, as any answer is
  expect(await rig.match('t')).toBe(0);
  expect(rig.asked).toEqual([0]);
});

it('what only peers hold is asked for until it is known to be slower than computing', async () => {
  const rig = new Rig();
  expect([await rig.match('a'), await rig.match('b'), await rig.match('c')]).toEqual([0, 0, 0]);
  expect(rig.asked).toEqual([0, 0]); // the first, and once more when it was known
  expect(rig.counters.unasked).toBe(1);
  rig.usPerBlock = 10;
  await rig.timers.pass(2_000);
  expect(await rig.match('d')).toBe(blocks); // asked again after a while
  expect(await rig.match('e')).toBe(blocks);
  expect(rig.asked).toHaveLength(4);
});

it('what is computed to learn how long it takes is counted as that', async () => {
  const rig = new Rig();
  rig.usPerBlock = 90; // computing takes 100
  let loaded = blocks;
  for (let at = 0; loaded === blocks; at++) {
    await rig.timers.pass(2_000);
    loaded = (await rig.match(`${at}`))!;
  }
  expect(loaded).toBe(blocks - 39);
  expect(rig.counters.reasons).toEqual({ 'lookup: computed to learn its time': 39 });
});

it('what may lie in another tier is always asked for, also behind a block that does not', async () => {
  const rig = new Rig();
  for (const id of ['a', 'b']) await rig.match(id);
  for (const [at, nearBlock] of [0, 9, 19, 29, 39].entries()) {
    rig.flagsOf = (block) => (block === nearBlock ? near : away);
    await rig.match(`near ${nearBlock}`);
    expect(rig.asked).toHaveLength(3 + at);
  }
  rig.flagsOf = () => undefined; // it cannot be read
  await rig.match('unread');
  expect(rig.asked).toHaveLength(8);
  expect(rig.counters.unasked).toBe(0);
});

it('what lies in the arena, and no further, is known at once', async () => {
  const rig = new Rig();
  rig.flagsOf = (block) => (block < 9 ? arena : nowhere);
  expect(rig.table.match([rig.session], 'r', hashes, 0)).toEqual({ state: 'known', blocks: 9 });
  expect(rig.table.match([rig.session], 's', hashes, 4)).toEqual({ state: 'known', blocks: 5 });
  rig.flagsOf = () => arena;
  expect(await rig.match('t')).toBe(blocks);
  expect(rig.counters).toMatchObject({
    unaskedHits: 3,
    unasked: 0,
    lookups: 0,
    heldBlocks: 9 + 5 + blocks,
    plannedBlocks: 9 + 5 + blocks,
  });
  // What was told too much came short: it is not tried again.
  rig.table.settle('t', [30], false);
  expect(await rig.match('t')).toBe(30);
  expect(rig.asked).toEqual([]);
});

it('what lies in the arena is asked for where more of it lies elsewhere, is not told, or is much', async () => {
  const rig = new Rig();
  rig.usPerBlock = 1;
  const long = Buffer.concat(Array<Buffer>(52).fill(hashes)); // the blocks behind have other flags
  for (const behind of [near, away, undefined]) {
    rig.flagsOf = (block) => (block < 9 ? arena : behind);
    expect(await rig.match(`behind: ${behind}`)).toBe(blocks);
  }
  rig.flagsOf = () => arena;
  expect(await rig.match('2080 blocks', 0, long)).toBe(2_080);
  expect(await rig.match('2048 blocks', 0, long.subarray(0, 2_048 * hashBytes))).toBe(2_048);
  expect(rig.counters).toMatchObject({ unaskedHits: 1, lookups: 4 });
  rig.flagsOf = (block) => (block === 2_048 % blocks ? nowhere : arena);
  expect(await rig.match('8 of 2080 blocks', 0, long)).toBe(8); // block 2048 has the name of block 8
  expect(rig.counters.unaskedHits).toBe(2);
});

it('of what lies in the arena the end is found, though of a long hit few blocks are looked at', async () => {
  const rig = new Rig();
  rig.usPerBlock = 1;
  /** 300 blocks, each with a name of its own. */
  const long = Buffer.alloc(300 * hashBytes);
  for (let block = 0; block < 300; block++) long.writeUInt16LE(block, block * hashBytes);
  for (let end = 1; end <= 300; end++) {
    let looks = 0;
    rig.flagsAt = (block) => {
      looks++;
      return block < end ? arena : nowhere;
    };
    expect([end, await rig.match(`until ${end}`, 0, long)]).toEqual([end, end]);
    expect(looks).toBeLessThan(50);
  }
  expect(rig.asked).toEqual([]);
  for (const block of [0, 128, 299]) {
    for (const flags of [near, undefined]) {
      rig.flagsAt = (at) => (at === block ? flags : arena);
      await rig.match(`${block} is ${flags}`, 0, long);
    }
  }
  for (const flags of [near, undefined]) {
    rig.flagsAt = (at) => (at < 200 ? arena : at < 203 ? flags : nowhere); // between two looks
    await rig.match(`202 is ${flags}`, 0, long);
  }
  expect(rig.asked).toHaveLength(8);
});

it('a table whose reading fails costs a question, not the request', async () => {
  const rig = new Rig();
  rig.usPerBlock = 1;
  rig.flagsOf = (block) => {
    if (block > 0) throw new RangeError('held table: cut off');
    return arena;
  };
  expect(await rig.match('a')).toBe(blocks);
  expect(rig.asked).toEqual([0]);
  expect(rig.counters.reasons).toEqual({ 'lookup: table': 1 });
});

it('a node without a table is asked, and for a model with windows every node', async () => {
  for (const [rig, flags] of [
    [new Rig(undefined, false), nowhere],
    [new Rig([64]), nowhere],
    [new Rig([64]), arena],
  ] as const) {
    rig.flagsOf = () => flags;
    await rig.match('a');
    expect(rig.asked).toEqual([0]);
  }
});

it('what was known goes on answering while it is asked anew, and counts once', async () => {
  const rig = new Rig();
  rig.usPerBlock = 10;
  rig.flagsOf = () => near;
  expect(await rig.match('r')).toBe(blocks);
  for (let times = 1; times <= 3; times++) {
    await rig.timers.pass(5_001);
    rig.heldBlocks = blocks - times;
    for (let twice = 0; twice < 2; twice++)
      expect(rig.table.match([rig.session], 'r', hashes, 0)).toEqual({ state: 'known', blocks: blocks - times + 1 });
    expect(rig.asked).toHaveLength(1 + times);
    await new Promise(setImmediate);
    expect(rig.table.match([rig.session], 'r', hashes, 0)).toEqual({ state: 'known', blocks: blocks - times });
  }
  expect(rig.counters).toMatchObject({ lookups: 4, heldBlocks: blocks, plannedBlocks: blocks });
  expect(rig.table.size).toBe(1);
});

it('who waits is asked for anew when its answer is old, and its turn finds the new one', async () => {
  const rig = new Rig();
  rig.usPerBlock = 10;
  rig.flagsOf = () => near;
  rig.heldBlocks = 0;
  const renew = (id: string) => rig.table.renew([rig.session], id, hashes);
  const match = () => rig.table.match([rig.session], 'r', hashes, 4);
  renew('r'); // nothing is known of it
  expect(await rig.match('r', 4)).toBe(0);
  renew('r');
  expect(rig.asked).toEqual([4]);
  await rig.timers.pass(5_001);
  let answer = (): void => {};
  rig.answers = new Promise((resolve) => {
    answer = resolve;
  });
  rig.heldBlocks = 30; // somebody has stored it meanwhile
  for (let times = 0; times < 3; times++) renew('r');
  rig.table.renew(null, 'r', hashes);
  expect(rig.asked).toEqual([4, 4]);
  expect(match()).toEqual({ state: 'known', blocks: 0 });
  answer();
  await new Promise(setImmediate);
  await rig.timers.pass(60_000); // a step that takes a minute
  expect(match()).toEqual({ state: 'known', blocks: 30 });
  expect(rig.table.size).toBe(1);
});

it('what is asked for anew is not planned before its turn: no probe is spent on it', async () => {
  const rig = new Rig();
  rig.usPerBlock = 90; // computing takes 100
  rig.flagsOf = () => near;
  let plans = 0;
  const { planner } = rig;
  const plan = planner.plan.bind(planner);
  planner.plan = (...hit) => {
    plans++;
    return plan(...hit);
  };
  await rig.match('r');
  expect(plans).toBe(1);
  for (let times = 0; times < 20; times++) {
    await rig.timers.pass(5_001);
    rig.table.renew([rig.session], 'r', hashes);
    await new Promise(setImmediate);
  }
  expect([plans, rig.asked.length]).toEqual([1, 21]);
  rig.table.match([rig.session], 'r', hashes, 0);
  expect([plans, rig.asked.length]).toEqual([2, 21]);
});

it.each(['DEADLINE', 'BUSY'] as const)('who is silent erases nothing that was known: %s', async (code) => {
  const rig = new Rig();
  rig.usPerBlock = 10;
  rig.flagsOf = () => near;
  expect(await rig.match('r')).toBe(blocks);
  const renew = () => rig.table.renew([rig.session], 'r', hashes);
  const match = () => rig.table.match([rig.session], 'r', hashes, 0);
  for (const [at, ask] of [renew, match].entries()) {
    await rig.timers.pass(5_001);
    rig.answers = Promise.reject(new KvError(code, 'no answer'));
    ask();
    await new Promise(setImmediate);
    for (let times = 0; times < 2; times++) {
      renew(); // not before it is old again
      expect(match()).toEqual({ state: 'known', blocks });
    }
    expect(rig.asked).toHaveLength(2 + at);
  }
  expect(rig.counters.reasons).toEqual({ [`lookup: ${code.toLowerCase()}`]: 2 });
  rig.answers = undefined;
  rig.heldBlocks = 7;
  await rig.timers.pass(5_001);
  renew();
  await new Promise(setImmediate);
  expect(match()).toEqual({ state: 'known', blocks: 7 });
});

it('who waits is asked for anew where peers alone hold it and may be faster: its turn finds what they came to hold', async () => {
  const rig = new Rig();
  rig.usPerBlock = 10; // computing takes 100
  expect(await rig.match('other')).toBe(blocks);
  rig.flagsOf = () => nowhere;
  expect(await rig.match('waits')).toBe(0);
  for (let times = 1; times <= 3; times++) {
    await rig.timers.pass(5_001);
    rig.flagsOf = () => away;
    rig.table.renew([rig.session], 'waits', hashes);
    await new Promise(setImmediate);
    expect(rig.asked).toHaveLength(1 + times);
  }
  expect(rig.table.match([rig.session], 'waits', hashes, 0)).toEqual({ state: 'known', blocks });
  // What is asked now and then where peers are slower was not spent: the second one is asked for, the third one is not.
  rig.usPerBlock = 1_000;
  expect([await rig.match('slow'), await rig.match('slower'), await rig.match('slowest')]).toEqual([0, 0, 0]);
  expect(rig.asked).toHaveLength(6);
});

it('what only peers hold is not asked for before its turn where they are slower: others are told when they have become fast', async () => {
  const rig = new Rig();
  rig.usPerBlock = 10;
  expect(await rig.match('waits')).toBe(blocks);
  rig.usPerBlock = 1_000;
  expect(await rig.match('slow')).toBe(0);
  rig.usPerBlock = 10;
  for (let times = 0; times < 60; times++) {
    await rig.timers.pass(5_001);
    rig.table.renew([rig.session], 'waits', hashes);
    await new Promise(setImmediate);
  }
  expect(rig.asked).toHaveLength(2);
  expect(await rig.match('later')).toBe(blocks);
  expect(await rig.match('waits')).toBe(blocks);
  await new Promise(setImmediate);
  rig.flagsOf = () => {
    throw new RangeError('held table: cut off');
  };
  await rig.timers.pass(5_001);
  rig.table.renew([rig.session], 'waits', hashes);
  expect(rig.asked).toHaveLength(5); // a table that cannot be read tells nothing
});

it('what is held here no more is pending until it is known', async () => {
  const rig = new Rig();
  rig.usPerBlock = 10;
  rig.flagsOf = () => near;
  expect(await rig.match('r', 4)).toBe(blocks - 4);
  expect(rig.table.match([rig.session], 'r', hashes, 2)).toEqual({ state: 'pending' });
  expect(await rig.match('r', 2)).toBe(blocks - 2);
  expect(rig.counters).toMatchObject({ lookups: 2, heldBlocks: blocks - 2, plannedBlocks: blocks - 2 });
});

it('what a load has found missing is not known again by an answer that was under way', async () => {
  const rig = new Rig();
  rig.usPerBlock = 10;
  rig.flagsOf = () => near;
  for (const id of ['short', 'whole']) expect(await rig.match(id)).toBe(blocks);
  await rig.timers.pass(5_001);
  for (const id of ['short', 'whole']) rig.table.match([rig.session], id, hashes, 0);
  rig.table.settle('short', [30], false);
  rig.table.settle('whole', [undefined], true);
  await new Promise(setImmediate);
  expect(rig.table.match([rig.session], 'short', hashes, 0)).toEqual({ state: 'known', blocks: 30 });
  expect(rig.table.size).toBe(1);
});

it('what is rather computed is told once, however often it is asked for', async () => {
  const rig = new Rig();
  rig.flagsOf = () => near;
  for (let times = 0; times < 3; times++) {
    expect(await rig.match('r')).toBe(0);
    await rig.timers.pass(5_001);
  }
  await rig.match('r');
  expect(rig.passed).toEqual([{ peer: blocks }]);
  expect(rig.counters.reasons).toEqual({ 'lookup: slower than computing': blocks });
  expect(rig.counters).toMatchObject({ heldBlocks: blocks, plannedBlocks: 0 });
});
