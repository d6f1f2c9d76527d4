/** The tier's life over servers that are made up: what one that fails, or says nothing, costs the others, and when they are asked again. */
import { KvError } from '@kvtier/errors';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { silentLog } from '../kit/testing/objects.ts';
import type { Partition, RedisCommands } from './redis-commands.ts';
import { RedisIndex } from './redis-index.ts';
import type { Reply } from './replies.ts';
import { lookScript, openScript, pageScript, pollScript, type Script } from './scripts.ts';
import { RedisService } from './service.ts';
import type { RedisTierOptions } from './settings.ts';
import { Values } from './values.ts';

const count = 4;
const pollMs = 200;
const gone = new KvError('IO', 'redis: Connection is closed.', { retry: true });
const refused = new KvError('CONFIG', 'redis: WRONGPASS invalid username-password pair');
const never = new Promise<never>(() => {});

/** A server a partition, empty. */
class Servers {
  /** "info 2", "open 2", "list 2", "poll 2". */
  calls: string[] = [];
  /** What a call comes to, instead of its answer. */
  readonly instead = new Map<string, () => Promise<Reply>>();
  readonly partitions = (): Partition[] =>
    Array.from({ length: count }, (_, index) => ({ index, base: `{p${index}}:`, keys: [], slot: index }));
  ready = async (): Promise<void> => {};
  /** One that refuses everything refuses these, too. */
  loadScripts = async (isStrict: boolean): Promise<void> => {
    for (const answer of isStrict ? this.instead.values() : [])
      await answer().catch((error: KvError) => {
        if (!error.retry) throw error;
      });
  };
  topologyRefreshed = async (): Promise<void> => {};
  address = ({ index }: Partition) => ({ host: 'a', port: index, name: `a:${index}` });
  reset = (): void => {};
  resetServer = (): void => {};
  close = (): void => {};
  command = (partition: Partition): Promise<Reply> => this.#answer('info', partition, Buffer.from(''));
  run = (script: Script, partition: Partition): Promise<Reply> => {
    const state = [Buffer.from('epoch'), 0, 256, 0, 0, 1];
    if (script === lookScript) return this.#answer('look', partition, [Buffer.from('ok')]);
    if (script === openScript) return this.#answer('open', partition, [Buffer.from('ok'), state, Buffer.from('')]);
    if (script === pollScript) return this.#answer('poll', partition, [state, 0, Buffer.from(''), []]);
    if (script !== pageScript) return Promise.resolve([state]);
    return this.#answer('list', partition, [state, Buffer.from('server'), Buffer.from('0'), []]);
  };

  of(name: string): string[] {
    return this.calls.filter((call) => call.startsWith(name));
  }

  async #answer(name: string, { index }: Partition, reply: Reply): Promise<Reply> {
    this.calls.push(`${name} ${index}`);
    return (await this.instead.get(`${name} ${index}`)?.()) ?? reply;
  }
}

let servers: Servers;
let service: RedisService;
beforeEach(() => {
  vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
  vi.spyOn(Values.prototype, 'probe').mockResolvedValue('ok');
  servers = new Servers();
  const settings = { mode: 'cluster', bytes: 256 * count, timeLimitMs: 60_000 };
  const options = { settings, log: silentLog, pollMs } as unknown as RedisTierOptions;
  service = new RedisService(options, new RedisIndex(), 'ours', () => servers as unknown as RedisCommands);
});
afterEach(() => {
  void service.close();
  vi.useRealTimers();
  vi.restoreAllMocks();
});

const pass = (ms: number): Promise<unknown> => vi.advanceTimersByTimeAsync(ms);
const fail = (index: number): void => service.commandFailed(gone, service.directories[index]!);

it('what one server refuses for good: a node that starts does not, and changes nothing at any; one that was in service goes on with the others', async () => {
  servers.instead.set('info 2', () => Promise.reject(refused));
  await expect(service.start()).rejects.toBe(refused);
  expect(servers.of('open')).toEqual([]);
  servers.instead.clear();
  await service.start();
  servers.instead.set('info 2', () => Promise.reject(refused));
  service.fail('all of them said nothing');
  await pass(100);
  expect([service.inService, service.partitionsOut]).toEqual([true, 1]);
  expect(service.outOfServiceReason).toBe(`1 of 4 partitions are out: ${refused.message}`);
  servers.instead.clear();
  await pass(100);
  expect(service.partitionsOut).toBe(0);
});

it('what all refuse for good keeps a node out, and it says why', async () => {
  await service.start();
  for (let i = 0; i < count; i++) servers.instead.set(`info ${i}`, () => Promise.reject(refused));
  service.fail('all of them said nothing');
  await pass(100);
  expect([service.inService, service.outOfServiceReason]).toEqual([false, refused.message]);
  servers.instead.clear();
  await pass(200);
  expect([service.inService, service.partitionsOut]).toEqual([true, 0]);
});

it('a node that was never in service changes nothing at any, whenever one server refuses it', async () => {
  servers.instead.set('info 2', () => Promise.reject(refused));
  service.startLater('nobody was there');
  await pass(100);
  expect([service.inService, servers.of('open'), service.outOfServiceReason]).toEqual([false, [], refused.message]);
});

it('a ledger of another version keeps a node out, at its start and ever after, and nothing is opened', async () => {
  const line = 'foreign: {p2}:ledger has format kvtier-redis-3';
  const newer = () => Promise.resolve([Buffer.from(line)]);
  servers.instead.set('look 2', newer);
  await expect(service.start()).rejects.toMatchObject({ code: 'CONFIG', retry: true });
  expect(servers.of('open')).toEqual([]);
  servers.instead.clear();
  await service.start();
  servers.calls = [];
  servers.instead.set('look 2', newer);
  service.fail('all of them said nothing');
  await pass(1000);
  expect([service.inService, servers.of('open'), servers.of('look').length]).toEqual([false, [], 3 * count]);
  expect(service.outOfServiceReason).toMatch(/has format kvtier-redis-3, of another version of kvtier; .*keyPrefix/);
  servers.instead.clear();
  await pass(5000);
  expect([service.inService, service.partitionsOut]).toEqual([true, 0]);
});

it('one that goes is tried at once, however long another has been away', async () => {
  servers.instead.set('info 1', () => Promise.reject(gone));
  await service.start();
  await pass(60_000); // that one is tried every 5 s by now
  const tries = servers.of('info 1').length;
  await pass(5_000);
  expect(servers.of('info 1').length).toBe(tries + 1);
  fail(0);
  expect(service.partitionsOut).toBe(2);
  await pass(100);
  expect([service.isIn(service.directories[0]!), service.partitionsOut]).toEqual([true, 1]);
});

it('one whose server says nothing holds up no other that comes back, however often', async () => {
  await service.start();
  servers.instead.set('info 1', () => never);
  fail(1);
  await pass(100);
  expect(servers.of('info 1').length).toBe(2); // this one is without an answer
  for (let i = 0; i < 3; i++) {
    fail(0);
    await pass(100);
    expect(service.isIn(service.directories[0]!)).toBe(true);
  }
  expect([servers.of('info 1').length, service.partitionsOut]).toEqual([2, 1]);
});

it('one whose server says nothing is asked once for its changes, and the others in every round', async () => {
  await service.start();
  servers.calls = [];
  servers.instead.set('poll 1', () => never);
  await pass(3 * pollMs);
  const round = ['poll 0', 'poll 2', 'poll 3'];
  expect(servers.of('poll')).toEqual(['poll 0', 'poll 1', 'poll 2', 'poll 3', ...round, ...round]);
});
