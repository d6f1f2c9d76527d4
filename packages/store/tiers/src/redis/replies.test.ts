/** What a server may say, true or not: the directory's view of it is sound, and the end is an answer or a KvError. */
import { KvError } from '@kvtier/errors';
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import type { TierChange } from '../kit/tier.ts';
import { Directory } from './directory.ts';
import type { RedisCommands } from './redis-commands.ts';
import { RedisIndex } from './redis-index.ts';
import type { Reply } from './replies.ts';
import { type Entry, parseEntry } from './replies.ts';
import * as scripts from './scripts.ts';

describe('an entry', () => {
  it.each<[string, Entry | undefined]>([
    ['2000256 1048512 aB_-9.z1', { bytes: 2_000_256, partBytes: 1_048_512, id: 'aB_-9.z1' }],
    ['256 1 x', { bytes: 256, partBytes: 1, id: 'x' }],
    ...[
      ...[
        '',
        ' ',
        'x',
        '2000256',
        '2000256 4096',
        '2000256 0 x',
        '2000256  x',
        '2000256 NaN x',
        'NaN 4096 x',
        '2000256 -1 x',
      ],
      ...[
        '2000256 1 x',
        '2000256 1.5 x',
        '2e6 4096 x',
        '0x100 4096 x',
        ' 2000256 4096 x',
        '2000256 4096 x ',
        '255 4096 x',
      ],
      ...[
        '2000256 4096 a b',
        '2000256 4096 a\nb',
        '2000256 4096 a:0',
        '2000256 4096 ä',
        `2000256 4096 ${'x'.repeat(65)}`,
      ],
      ...['9007199254740993 9007199254740993 x', '99999999999999 99999999999999 x', '02000256 4096 x'],
    ].map((text): [string, undefined] => [text, undefined]),
  ])('%j is %j', (text, entry) => expect(parseEntry(text)).toEqual(entry));
});

const bytes = (text: string): Buffer => Buffer.from(text, 'latin1');
const space = namespaceNamed('one');
const hashes = [0, 1, 2].map(hashNamed);
const nameOf = (i: number): string => space.key + hashes[i]!;
const behindLength = (text: string): string => String.fromCharCode(text.length) + text;
const names = hashes.map((_, i) => behindLength(nameOf(i))).join('');
const entries = ['2000 512 n.0', '2000 512 n.1', '2000 512 n.2'];
const stateAt = (newest: number): Reply => [bytes('epoch'), 5_000, 100_000, newest, 1.7e15, newest + 1692];
const state = stateAt(7);
const event = (number: number, kind = 's'): Reply => [
  bytes(`${number}-${number + 1692}`),
  ['n', 'another', kind, names, 'e', entries.join('\n')].map(bytes),
];

const pageAt = (at: Reply, server = 'abc', cursor = '0'): Reply => [
  ...[at, bytes(server), bytes(cursor)],
  entries.flatMap((entry, i) => [bytes(nameOf(i)), bytes(entry)]),
];

/** What a sound server says. */
const truth: Readonly<Record<string, Reply>> = {
  [scripts.openScript.sha]: [bytes('ok'), state, bytes('7-1')],
  [scripts.pollScript.sha]: [
    [bytes('epoch'), 5_000, 100_000, 9, 1.7e15, 1701],
    1,
    bytes('7-1'),
    [event(8), event(9, 'r')],
  ],
  [scripts.reserveScript.sha]: [
    stateAt(9),
    bytes('rhn'),
    [bytes(entries[1]!)],
    bytes(names),
    bytes(entries.join('\n')),
  ],
  [scripts.commitScript.sha]: [stateAt(10), bytes('shn'), [bytes(entries[1]!)]],
  [scripts.removeScript.sha]: [stateAt(10)],
  [scripts.touchScript.sha]: [state],
  [scripts.pageScript.sha]: pageAt(state),
  [scripts.clockScript.sha]: [state],
  [scripts.resetScript.sha]: 1,
  [scripts.orphansScript.sha]: 1,
  SCAN: [bytes('0'), [bytes('v:n.0:0')]],
};

const anything = fc.letrec<{ reply: Reply }>((tie) => ({
  reply: fc.oneof(
    { depthSize: 'small' },
    fc.oneof(fc.uint8Array({ maxLength: 80 }).map(Buffer.from), fc.string({ maxLength: 20 }).map(bytes)),
    fc
      .constantFrom(
        '',
        '0',
        'ok',
        'new',
        'damaged',
        'foreign: x',
        '1-1',
        'n',
        's',
        'r',
        'e',
        ...entries,
        names,
        '2000 0 x',
      )
      .map(bytes),
    fc.oneof(fc.integer(), fc.double(), fc.constantFrom(0, 1, -1, 2 ** 53)),
    fc.constant(null),
    fc.array(tie('reply'), { maxLength: 6 }),
  ),
})).reply;

/** The truth, with one place of it exchanged. */
function liesAbout(reply: Reply, path: number, lie: Reply): Reply {
  if (!Array.isArray(reply) || reply.length === 0 || path % 5 === 0) return lie;
  const at = path % reply.length;
  return reply.with(at, liesAbout(reply[at]!, Math.floor(path / 5), lie));
}

const serverThat = (says: (name: string) => Reply): RedisCommands =>
  ({
    run: async (script: scripts.Script) => says(script.sha),
    command: async (_: unknown, name: string) => says(name),
  }) as unknown as RedisCommands;

const partition = { index: 0, base: 'kvtier:{p0}:', keys: ['a', 'b', 'c', 'd', 'e', 'f'], slot: 0 };
const uses = hashes.map((hash, i) => ({
  hash,
  id: `n.${i}`,
  bytes: 2_000,
  written: true,
  usedUs: 1,
  ttlMs: undefined,
}));

/** Everything a node does with a directory; how each step ended. */
async function live(
  says: (name: string) => Reply,
): Promise<{ ends: string[]; index: RedisIndex; directory: Directory }> {
  const index = new RedisIndex();
  const directory = new Directory(partition, serverThat(says), index, 'us');
  const ends: string[] = [];
  const step = async (act: () => Promise<unknown>): Promise<void> => {
    ends.push(
      await act().then(
        () => 'well',
        (error: unknown) => (error instanceof KvError ? error.code : String(error)),
      ),
    );
  };
  await step(() => directory.open(1, 100_000));
  await step(() => directory.list(() => {}));
  await step(() => directory.poll());
  await step(() => directory.reserve(space, uses, { leaseMs: 1, partBytes: 512, share: undefined }));
  await step(() => directory.commit(space, uses, 512));
  await step(() => directory.remove(space, [{ hash: hashes[0]!, text: entries[0]! }]));
  await step(() => directory.touch([{ field: bytes(nameOf(0)), usedUs: 1 }]));
  return { ends, index, directory };
}

describe('a directory', () => {
  it('lives well with a server that is sound', async () => {
    const { ends, index } = await live((name) => truth[name]!);
    expect(ends).toEqual(Array(7).fill('well'));
    expect(index.count).toBe(2); // what was committed; a removal of the second came before
  });

  it('takes no nonsense from one that is not: an answer or a KvError, and only sound entries are listed', async () => {
    const property = fc.asyncProperty(
      fc.constantFrom(...Object.keys(truth)),
      fc.oneof(fc.constant(undefined), fc.nat()),
      anything,
      async (where, path, lie) => {
        let asked = 0;
        const { ends, index, directory } = await live((name) => {
          if (name !== where || ++asked > 200) return truth[name]!;
          return path === undefined ? lie : liesAbout(truth[name]!, path, lie);
        });
        const [opened, ...others] = ends;
        expect(opened).toMatch(/^(well|IO|CONFIG)$/);
        for (const end of others) expect(end).toMatch(opened === 'well' ? /^(well|IO|CONFIG)$/ : /^CANCELLED$/);
        index.checkIntegrity();
        const held: TierChange[] = [];
        index.follow((change) => held.push(change))();
        for (const { namespace, hashes: listed } of held) {
          for (const hash of listed) {
            expect([16, 32]).toContain(hash.length);
            expect(parseEntry(index.get(namespace!, hash)!.text)).toBeDefined();
          }
        }
        for (const number of [directory.usedBytes, directory.capacityBytes])
          expect(Number.isSafeInteger(number)).toBe(true);
      },
    );
    await fc.assert(property, { numRuns: 500 });
  });

  it.each<[string, Reply]>([
    ['an event of another form', [state, 1, bytes(''), [[bytes('8-1'), [bytes('foo'), bytes('bar')]]]]],
    ['an event of another number', [[bytes('epoch'), 5_000, 100_000, 9, 1.7e15, 1701], 1, bytes(''), [event(9)]]],
    [
      'a number of events that is smaller than it was',
      [[bytes('epoch'), 5_000, 100_000, 6, 1.7e15, 1698], 1, bytes(''), []],
    ],
    [
      'events that it counts and does not have',
      [[bytes('epoch'), 5_000, 100_000, 9, 1.7e15, 1701], 1, bytes('7-1'), []],
    ],
    ['an epoch of its own', [[bytes('other'), 5_000, 100_000, 7, 1.7e15, 1699], 1, bytes(''), []]],
  ])('lists anew after %s', async (_, polled) => {
    const directory = new Directory(
      partition,
      serverThat((name) => (name === scripts.pollScript.sha ? polled : truth[name]!)),
      new RedisIndex(),
      'us',
    );
    await directory.open(1, 100_000);
    await expect(directory.poll()).rejects.toMatchObject({ code: 'IO', retry: true });
  });

  it('whose last event is another than it was has another past', async () => {
    let lastId = '7-1';
    const says = (name: string): Reply =>
      name === scripts.pollScript.sha ? [state, 1, bytes(lastId), []] : truth[name]!;
    const directory = new Directory(partition, serverThat(says), new RedisIndex(), 'us');
    await directory.open(1, 100_000);
    await directory.poll();
    lastId = '7-2';
    await expect(directory.poll()).rejects.toThrow('has another past');
  });

  it('a listing whose newest event is another one afterwards is of another past', async () => {
    let listed = stateAt(9);
    const says = (name: string): Reply => (name === scripts.pageScript.sha ? pageAt(listed) : truth[name]!);
    const list = async (): Promise<Directory> => {
      const directory = new Directory(partition, serverThat(says), new RedisIndex(), 'us');
      await directory.open(1, 100_000);
      await directory.list(() => {});
      return directory;
    };
    await (await list()).poll(); // events 8 and 9, as they were
    listed = [bytes('epoch'), 5_000, 100_000, 8, 1.7e15, 5_000];
    await expect((await list()).poll()).rejects.toThrow('has another past');
    listed = stateAt(10);
    await expect((await list()).poll()).rejects.toThrow('has forgotten its latest events');
  });

  it('is not listed from two servers: a cursor of one says nothing to the other', async () => {
    const servers = ['abc', 'abc', 'def'];
    const says = (name: string): Reply =>
      name === scripts.pageScript.sha ? pageAt(state, servers.shift()!, servers.length > 0 ? '5' : '0') : truth[name]!;
    const directory = new Directory(partition, serverThat(says), new RedisIndex(), 'us');
    await directory.open(1, 100_000);
    await expect(directory.list(() => {})).rejects.toThrow('came to another server');
  });

  it('a change whose event is another one afterwards, or none, is of another past', async () => {
    let after: Reply = stateAt(8);
    let events: Reply[] = [event(8)];
    const says = (name: string): Reply => {
      if (name === scripts.removeScript.sha || name === scripts.reserveScript.sha) {
        return name === scripts.removeScript.sha ? [after] : [after, bytes('nnn'), [], bytes(''), bytes('')];
      }
      return name === scripts.pollScript.sha ? [after, 1, bytes('7-1'), events] : truth[name]!;
    };
    const removed = [{ hash: hashes[0]!, text: entries[0]! }];
    const fresh = async (): Promise<Directory> => {
      after = stateAt(8);
      const directory = new Directory(partition, serverThat(says), new RedisIndex(), 'us');
      await directory.open(1, 100_000);
      await directory.remove(space, removed);
      return directory;
    };
    await (await fresh()).poll();
    const other = await fresh();
    events = [[bytes('8-5000'), (event(8) as Reply[])[1]!]];
    await expect(other.poll()).rejects.toThrow('has another past');
    const third = await fresh();
    after = [bytes('epoch'), 5_000, 100_000, 8, 1.7e15, 5_000];
    const reserve = () => third.reserve(space, uses, { leaseMs: 1, partBytes: 512, share: undefined });
    await expect(reserve()).rejects.toThrow('has another past');
    after = stateAt(7);
    await expect(reserve()).rejects.toThrow('has forgotten its latest events');
  });

  it('a removal that was refused is asked for again with the next poll, and is not waited for without an end', async () => {
    let refuses = true;
    const asked: string[] = [];
    const says = (name: string): Reply => {
      if (name === scripts.removeScript.sha) asked.push(refuses ? 'no' : 'yes');
      if (refuses && name === scripts.removeScript.sha) throw new KvError('IO', 'OOM');
      if (name === scripts.removeScript.sha) return [state];
      if (name === scripts.pollScript.sha) return [state, 1, bytes('7-1'), []];
      return truth[name]!;
    };
    const index = new RedisIndex();
    const directory = new Directory(partition, serverThat(says), index, 'us');
    await directory.open(1, 100_000);
    await expect(directory.remove(space, [{ hash: hashes[0]!, text: entries[0]! }])).rejects.toThrow('OOM');
    await directory.poll();
    await directory.list(() => {});
    expect(index.get(space, hashes[0]!)).toBeUndefined(); // the server has it, and will not for long
    refuses = false;
    await directory.poll();
    await directory.poll();
    expect(asked).toEqual(['no', 'no', 'yes']);
    await directory.list(() => {});
    expect(index.get(space, hashes[0]!)?.text).toBe(entries[0]); // were it still there, it would be listed
  });
});
