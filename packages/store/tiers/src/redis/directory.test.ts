/** News that come many together: what else there is to do has its turns between them. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { Directory, fieldOf } from './directory.ts';
import { ForeignValues } from './foreign-values.ts';
import type { Partition, RedisCommands } from './redis-commands.ts';
import { RedisIndex } from './redis-index.ts';
import type { Reply } from './replies.ts';
import { openScript, pollScript, reserveScript, type Script, touchScript } from './scripts.ts';

const space = namespaceNamed('one');
const hashes = Array.from({ length: 50_000 }, (_, i) => hashNamed(i));
const perEvent = 1_000;
const partition = { index: 0, base: 'kvtier:{p0}:', keys: [], slot: 0 } satisfies Partition;

/** A server that has removed all of them, a thousand an event. `broken`: this event names nothing that is a name. */
async function directoryOf(index: RedisIndex, broken = -1): Promise<Directory> {
  const newest = hashes.length / perEvent;
  const state = (number: number): Reply => [Buffer.from('epoch'), 0, 1 << 20, number, 1_000_000, 1];
  const news = Array.from({ length: newest }, (_, event) => {
    const gone = hashes.slice(event * perEvent, (event + 1) * perEvent);
    const names = gone.map((hash) => fieldOf(space, hash)).flatMap((name) => [Buffer.of(name.length), name]);
    if (event === broken) names.pop();
    const words = ['n', 'other', 'r', Buffer.concat(names), 'e', gone.map(() => '956 4096 n.1').join('\n')];
    return [Buffer.from(`${event + 1}-1`), words.map((word) => Buffer.from(word))];
  });
  const run = async (script: Script, _: Partition, args: readonly unknown[]): Promise<Reply> => {
    if (script === openScript) return [Buffer.from('ok'), state(0), Buffer.from('')];
    return script === pollScript ? [state(newest), 1, Buffer.from(''), news.slice(Number(args[1]))] : [state(0)];
  };
  const directory = new Directory(partition, { run } as unknown as RedisCommands, index, 'ours');
  await directory.open(1, 1 << 20);
  for (const hash of hashes) index.set(space, hash, '956 4096 n.1');
  return directory;
}

it('many removals take several turns', async () => {
  const index = new RedisIndex();
  const directory = await directoryOf(index);
  let [turns, isDone] = [0, false];
  const count = (): void => {
    turns++;
    if (!isDone) setImmediate(count);
  };
  setImmediate(count);
  await directory.poll();
  isDone = true;
  expect(index.count).toBe(0);
  expect(turns).toBeGreaterThan(1);
});

it('a server that is lost between two turns: nothing more of its news is told', async () => {
  const index = new RedisIndex();
  const directory = await directoryOf(index);
  let left = 0;
  setImmediate(() => {
    directory.end();
    left = index.count;
  });
  await expect(directory.poll()).rejects.toMatchObject({ code: 'CANCELLED' });
  expect(left).toBeGreaterThan(0);
  expect(index.count).toBe(left);
});

it('of one that has ended nothing is asked before it is opened anew, and what was asked before says nothing', async () => {
  const state = (number: number): Reply => [Buffer.from('epoch'), 0, 1 << 20, number, 1_000_000, 1];
  const answers: ((error?: Error) => void)[] = [];
  const asked: Script[] = [];
  const run = (script: Script): Promise<Reply> => {
    asked.push(script);
    if (script === openScript) return Promise.resolve([Buffer.from('ok'), state(0), Buffer.from('')]);
    if (script !== touchScript) return Promise.resolve([state(0)]);
    return new Promise((resolve, reject) => {
      answers.push((error) => (error === undefined ? resolve([state(0)]) : reject(error)));
    });
  };
  const directory = new Directory(partition, { run } as unknown as RedisCommands, new RedisIndex(), 'ours');
  const cancelled = { code: 'CANCELLED' };
  await expect(directory.touch([])).rejects.toMatchObject(cancelled);
  await directory.open(1, 1 << 20);
  const [early, late] = [directory.touch([]), directory.touch([])];
  directory.end();
  asked.length = 0;
  await expect(directory.poll()).rejects.toMatchObject(cancelled);
  expect([asked, directory.isOpen]).toEqual([[], false]);
  await directory.open(1, 1 << 20);
  answers[0]!();
  answers[1]!(new KvError('IO', 'redis: Command timed out', { retry: true }));
  await expect(early).rejects.toMatchObject(cancelled);
  await expect(late).rejects.toMatchObject(cancelled);
  expect(directory.isOpen).toBe(true);
});

it('an event that cannot be read ends a poll behind those before it: each is read in its turn', async () => {
  const index = new RedisIndex();
  const directory = await directoryOf(index, 2);
  await expect(directory.poll()).rejects.toMatchObject({ code: 'IO', retry: true });
  expect(index.count).toBe(hashes.length - 2 * perEvent);
});

it('what is passed over is not held, whatever tells of it, until the block has another value or none', async () => {
  const index = new RedisIndex();
  const [name, other] = [hashNamed('foreign'), hashNamed('other')];
  const [theirs, ours] = ['956 4096 n.1', '956 4096 n.2'];
  const state = (number: number): Reply => [Buffer.from('epoch'), 0, 1 << 20, number, 1_000_000, 1];
  let [held, newest] = [theirs, 0];
  let news: Reply[] = [];
  const tell = (kind: 's' | 'r', entry: string): void => {
    const field = fieldOf(space, name);
    const words = ['n', 'other', kind, Buffer.concat([Buffer.of(field.length), field]), 'e', entry];
    news = [[Buffer.from(`${++newest}-1`), words.map((word) => Buffer.from(word))]];
  };
  const run = async (script: Script): Promise<Reply> => {
    if (script === openScript) return [Buffer.from('ok'), state(0), Buffer.from('')];
    if (script === pollScript) return [state(newest), newest, Buffer.from(''), news];
    if (script !== reserveScript) return [state(newest)];
    return [state(newest), Buffer.from('h'), [Buffer.from(held)], Buffer.from(''), Buffer.from('')];
  };
  const directory = new Directory(partition, { run } as unknown as RedisCommands, index, 'ours');
  await directory.open(1, 1 << 20);
  const block = { hash: name, id: 'ours.1', bytes: 956 };
  const reserve = () => directory.reserve(space, [block], { leaseMs: 1, partBytes: 4096, share: undefined });
  const isListed = (): boolean => index.get(space, name) !== undefined;
  // Read as what it is while it was asked for.
  directory.passOver(space, name, theirs);
  expect([(await reserve()).answers, isListed(), directory.isForeign(space, name)]).toEqual([['refused'], false, true]);
  expect(directory.isForeign(space, other)).toBe(false);
  tell('s', theirs);
  await directory.poll();
  expect([isListed(), directory.isForeign(space, name), directory.nonsense]).toEqual([false, true, 0]);
  tell('r', ours); // of a value before it
  await directory.poll();
  expect(directory.isForeign(space, name)).toBe(true);
  tell('r', theirs);
  await directory.poll();
  expect(directory.isForeign(space, name)).toBe(false);
  directory.passOver(space, name, theirs);
  held = ours;
  expect([(await reserve()).answers, isListed(), directory.isForeign(space, name)]).toEqual([['held'], true, false]);
  // A server that was lost may have other blocks.
  directory.passOver(space, name, ours);
  directory.end();
  await directory.open(1, 1 << 20);
  expect(directory.isForeign(space, name)).toBe(false);
});

it('no more than so many are passed over: the latest', () => {
  const values = new ForeignValues(2);
  for (const name of ['a', 'b', 'a', 'c']) values.add(name, `entry of ${name}`);
  expect(['a', 'b', 'c'].map((name) => values.has(name))).toEqual([true, false, true]);
});
