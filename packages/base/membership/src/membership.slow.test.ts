/** Announcers and readers against real servers: leases, names, outages, failover. */
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { readFileSync } from 'node:fs';
import {
  type MemberServers,
  type Membership,
  maxMembers,
  memberServersSchema,
  nodeRecordSchema,
  type WorkerRecord,
  workerRecordSchema,
} from '@kvtier/config';
import { afterAll, afterEach, beforeAll, describe, expect, it } from 'vitest';
import {
  memberAclRules,
  RedisServer,
  type ServerGroup,
  startCluster,
  startSentinel,
  startTls,
  until,
} from '../../../../infra/redis/servers.ts';
import { stopProcess } from '../../../../infra/stopped.ts';
import { type Announced, announceNode, announceWorker, MemberReader } from './index.ts';
import { failover, Waits } from './testing/failover.ts';
import { Lines, memberServers, startMember } from './testing/index.ts';

const leaseMs = 1_500;
/** No lease outlives its owner by more. */
const longestLeaseMs = 2_000;
/** Of a machine that does many other things: what the servers and this process may be kept waiting. */
const slackMs = 500;
const pollMs = 100;
/** The configuration's default, where servers go away. */
const usualLimitMs = 500;

const worker = (name: string, change: Partial<WorkerRecord> = {}): WorkerRecord =>
  workerRecordSchema.parse({ name, address: '127.0.0.1:1', ...change });

const ends: (() => Promise<unknown>)[] = [];
afterEach(async () => {
  for (const end of ends.splice(0).reverse()) await end();
});

interface Reading {
  readonly told: Membership[];
  readonly problems: (string | undefined)[];
  readonly lines: Lines;
  names(): string[];
  /** Never so far: a name that was told and then was not. */
  lost(...names: string[]): string[];
}

function read(redis: MemberServers): Reading {
  const told: Membership[] = [];
  const problems: (string | undefined)[] = [];
  const lines = new Lines();
  const reader = new MemberReader({
    ...{ redis, pollMs, log: lines },
    changed: (members) => told.push(members),
    problem: (why) => problems.push(why),
  });
  ends.push(() => reader.close());
  const namesOf = ({ workers, nodes }: Membership): string[] => [...workers, ...nodes].map(({ name }) => name);
  return {
    ...{ told, problems, lines },
    names: () => (told.length === 0 ? [] : namesOf(told.at(-1)!)),
    lost: (...names) => {
      const from = told.findIndex((members) => names.every((name) => namesOf(members).includes(name)));
      return names.filter((name) => told.slice(from).some((members) => !namesOf(members).includes(name)));
    },
  };
}

/** All of them are in the list for longer than a lease lasts; a machine that kept one of them from renewing it in time gives another try. */
async function renewed(reading: Reading, ...names: string[]): Promise<void> {
  let seen = -1;
  let sinceMs = 0;
  await until(
    () => {
      if (seen !== reading.told.length || !names.every((name) => reading.names().includes(name))) {
        seen = reading.told.length;
        sinceMs = performance.now();
      }
      return performance.now() - sinceMs > leaseMs + 500;
    },
    'leases that are renewed',
    20_000,
  );
}

async function announced(redis: MemberServers, record: WorkerRecord): Promise<Announced> {
  const lines = new Lines();
  const member = announceWorker(record, { redis, leaseMs, log: lines });
  ends.push(() => member.close());
  await lines.until(/announced to the cluster/);
  return member;
}

describe('one server', () => {
  let server: RedisServer;
  let prefix = 0;
  let redis: MemberServers;
  beforeAll(async () => {
    server = await RedisServer.start();
  });
  afterAll(async () => {
    await server.stop();
  });
  const fresh = (): MemberServers => {
    redis = memberServers([server.url], 'single', `t${++prefix}:`);
    return redis;
  };

  it('a worker and a node are in the list as they are, and out of it at their end', async () => {
    const reading = read(fresh());
    const a = await announced(redis, worker('a', { role: 'prefill', node: 'n' }));
    const node = nodeRecordSchema.parse({ name: 'n', peer: { host: '127.0.0.1', port: 7 } });
    const n = announceNode(node, { redis, leaseMs, log: new Lines() });
    ends.push(() => n.close());
    await until(() => reading.names().length === 2, 'both');
    expect(reading.told.at(-1)).toEqual({ workers: [worker('a', { role: 'prefill', node: 'n' })], nodes: [node] });
    await a.drain(5_000);
    await until(() => reading.told.at(-1)!.workers[0]!.draining, 'draining');
    await n.close();
    await a.close();
    await a.close();
    await until(() => reading.names().length === 0, 'nobody');
    expect(reading.problems).toEqual([]);
    expect(await server.cli('hlen', `${redis.keyPrefix}{members}:records`)).toBe('0');
  });

  it('a lease does not outlive its owner by more than 2 s, killed or stopped', async () => {
    const outlived = async (redis: MemberServers, signal: 'SIGKILL' | 'SIGSTOP'): Promise<void> => {
      const reading = read(redis);
      const child = await startMember(redis, 'mortal');
      ends.push(() => ended(child));
      await announced(redis, worker('other'));
      await until(() => reading.names().join() === 'mortal,other', 'both');
      await renewed(reading, 'mortal', 'other');
      if (signal === 'SIGSTOP') await stopProcess(child.pid!);
      else await ended(child);
      // By the server's clock: how late readers see it is theirs.
      const [seconds, us] = (await server.cli('time')).split('\n').map(Number);
      const endMs = Number(await server.cli('zscore', `${redis.keyPrefix}{members}:leases`, 'worker:mortal'));
      expect(endMs - (seconds! * 1000 + us! / 1000), signal).toBeLessThan(longestLeaseMs);
      await until(() => reading.names().join() === 'other', `the end of its lease: ${signal}`);
      if (signal === 'SIGSTOP') {
        child.kill('SIGCONT');
        await until(() => reading.names().join() === 'mortal,other', 'it is back');
      }
      expect(reading.problems, signal).toEqual([]);
    };
    // Two lists on one server: what is waited for is time, which passes for both.
    await Promise.all([outlived(fresh(), 'SIGKILL'), outlived(fresh(), 'SIGSTOP')]);
  });

  it('who comes after one that was killed gets its name when the lease ends, without a line that says otherwise', async () => {
    const reading = read(fresh());
    const child = await startMember(redis, 'a');
    await until(() => reading.names().length === 1, 'the first');
    child.kill('SIGKILL');
    const lines = new Lines();
    const atMs = performance.now();
    const next = announceWorker(worker('a', { role: 'decode' }), { redis, leaseMs, log: lines });
    ends.push(() => next.close());
    await lines.until(/announced/);
    expect(performance.now() - atMs).toBeLessThan(longestLeaseMs + slackMs);
    expect(lines.all).toEqual(['info announced to the cluster {"member":"worker:a"}']);
    await until(() => reading.told.at(-1)!.workers[0]?.role === 'decode', 'the second');
  });

  it('of two members of one name the second is refused in one line, and follows when the first has left', async () => {
    const reading = read(fresh());
    const first = await announced(redis, worker('a', { role: 'prefill' }));
    const lines = new Lines();
    const second = announceWorker(worker('a', { role: 'decode' }), { redis, leaseMs, log: lines });
    ends.push(() => second.close());
    await lines.until(/not announced/);
    expect(lines.all).toEqual([
      'error not announced to the cluster {"member":"worker:a","reason":"another living member has this name; give each member a name of its own"}',
    ]);
    expect(second.state).toBe('refused');
    expect(reading.told.map(({ workers }) => workers.map(({ role }) => role).join())).not.toContain('decode');
    // Its end does not end the other's.
    const third = announceWorker(worker('a'), { redis, leaseMs, log: new Lines() });
    await third.close();
    expect(reading.names()).toEqual(['a']);
    await first.close();
    await lines.until(/announced to the cluster/);
    await until(() => reading.told.at(-1)!.workers[0]?.role === 'decode', 'the second');
  });

  it('a key that a member changes is read at once', async () => {
    const reading = read(fresh());
    const events = { endpoint: 'tcp://10.0.0.1:1', replayEndpoint: null, topic: '' };
    const keyed = (key: string) => ({ ...events, serverKey: key.repeat(40) });
    const member = await announced(redis, worker('a', { events: keyed('1') }));
    const heard = () => reading.told.at(-1)?.workers[0]?.events;
    await until(() => heard()?.serverKey === '1'.repeat(40), 'the first key');
    member.change({ events: keyed('2') });
    await until(() => heard()?.serverKey === '2'.repeat(40), 'the second key');
    expect([heard(), reading.names(), reading.lost('a')]).toEqual([keyed('2'), ['a'], []]);
  });

  it('records that are none are ignored, each in one line; what one says more is left out', async () => {
    fresh();
    await announced(redis, worker('a'));
    const owner = '0'.repeat(32);
    const at = `${redis.keyPrefix}{members}:`;
    for (const [id, text] of [
      ['worker:json', 'x'],
      ['worker:shape', '{"name":"shape"}'],
      ['worker:name', '{"name":"another","address":"x:1"}'],
      ['worker:more', '{"name":"more","address":"x:1","what":1}'],
      ['strange', '{"name":"strange","address":"x:1"}'],
      ['worker:huge', `{"name":"huge","address":"${'x'.repeat(9_000)}"}`],
    ] as const) {
      await server.cli('hset', `${at}records`, id, owner + text);
      await server.cli('zadd', `${at}leases`, String(Date.now() + 9_000), id);
    }
    await server.cli('zadd', `${at}leases`, String(Date.now() + 9_000), 'worker:norecord');
    await server.cli('set', `${at}version`, 'x');
    const reading = read(redis);
    await until(() => reading.told.length > 0, 'the list');
    expect(reading.names()).toEqual(['a', 'more']);
    await server.cli('set', `${at}version`, 'y');
    await announced(redis, worker('b'));
    await until(() => reading.names().length === 3, 'the next list');
    expect(reading.lines.all.sort()).toEqual([
      'warn a record that is none is ignored {"member":"strange","reason":"it is neither a worker nor a node"}',
      expect.stringMatching(
        /^warn a record that is none is ignored {"member":"worker:json","reason":"it is no JSON"}$/,
      ),
      'warn a record that is none is ignored {"member":"worker:name","reason":"its name is another one"}',
      expect.stringMatching(/worker:shape","reason":"address: /),
    ]);
  });

  it('a lease that ends later than any can is cut: the clock of the server before was ahead', async () => {
    fresh();
    const at = `${redis.keyPrefix}{members}:`;
    await server.cli('hset', `${at}records`, 'worker:ghost', `${'0'.repeat(32)}${JSON.stringify(worker('ghost'))}`);
    await server.cli('zadd', `${at}leases`, String(Date.now() + 3_600_000), 'worker:ghost');
    const reading = read(redis);
    await until(() => reading.names().join() === 'ghost', 'the ghost');
    await announced(redis, worker('a'));
    const [seconds, us] = (await server.cli('time')).split('\n').map(Number);
    const endMs = Number(await server.cli('zscore', `${at}leases`, 'worker:ghost'));
    expect(endMs).toBeLessThanOrEqual(seconds! * 1000 + us! / 1000 + leaseMs);
    await until(() => reading.names().join() === 'a', 'only who lives');
  });

  it('keys of another program are a problem of one line, and no harm', async () => {
    fresh();
    await server.cli('set', `${redis.keyPrefix}{members}:leases`, 'theirs');
    const reading = read(redis);
    const lines = new Lines();
    const member = announceWorker(worker('a'), { redis, leaseMs, log: lines });
    ends.push(() => member.close());
    await until(() => reading.problems.length > 0, 'a problem');
    expect(reading.problems[0]).toMatch(/^the list of members in Redis cannot be read \(redis: .*WRONGTYPE[^\n]*$/);
    await lines.until(/^warn the list of members cannot be reached .*WRONGTYPE/);
    await server.cli('del', `${redis.keyPrefix}{members}:leases`);
    await until(() => reading.names().join() === 'a', 'it is there');
    expect(await server.cli('get', `${redis.keyPrefix}{members}:version`)).not.toBe('');
  });
});

it('a full list: who is in it is read in short turns, and who comes is refused in one line', async () => {
  const server = await RedisServer.start();
  ends.push(() => server.stop());
  const redis = memberServers([server.url]);
  const record = JSON.stringify({ ...worker('NAME', { node: 'n', revision: 'r' }), events: null });
  const lua = `for i = 1, ${maxMembers} do
    local id = string.format('worker:w%05d', i)
    redis.call('HSET', KEYS[1], id, string.rep('0', 32) .. string.gsub(ARGV[1], 'NAME', string.sub(id, 8)))
    redis.call('ZADD', KEYS[2], ARGV[2], id)
  end`;
  const at = `${redis.keyPrefix}{members}:`;
  await server.cli('eval', lua, '2', `${at}records`, `${at}leases`, record, String(Date.now() + 4_000));
  const reading = read(redis);
  await until(() => reading.names().length === maxMembers, 'all of them');
  const lines = new Lines();
  const one = announceWorker(worker('more'), { redis, leaseMs, log: lines });
  ends.push(() => one.close());
  await lines.until(/not announced/);
  expect(lines.all).toEqual([expect.stringMatching(/"the list of members is full; remove members, or give/)]);
  expect(reading.lines.all).toEqual([]);
  // When their leases have ended there is room.
  await until(() => one.state === 'announced', 'room', 30_000);
});

it('with TLS and a user who may do what docs/cluster.md says, and nothing else', async () => {
  const group = await startTls(memberAclRules('kvtier:'));
  ends.push(() => group.stop());
  const page = readFileSync(new URL('../../../../docs/cluster.md', import.meta.url));
  const documented = [...page.toString('utf8').matchAll(/ACL SETUSER members on >SECRET ([^`]*)```/g)][0]![1]!;
  expect(documented.replaceAll(/\s+/g, ' ').trim()).toBe(memberAclRules('kvtier:'));
  const redis = memberServersSchema.parse({
    ...{ servers: group.urls, username: 'kvtier', password: 'secret', tls: { caFile: group.caFile } },
  });
  const reading = read(redis);
  const a = await announced(redis, worker('a'));
  await until(() => reading.names().join() === 'a', 'it is there');
  await a.close();
  await until(() => reading.names().length === 0, 'it is gone');
  const wrong = read({ ...redis, password: 'wrong' });
  await until(() => wrong.problems.length > 0, 'a problem');
  expect(wrong.problems[0]).toMatch(
    /^the list of members in Redis cannot be read \(redis: WRONGPASS[^\n]*correct username/,
  );
  expect(reading.problems).toEqual([]);
});

describe('one server that stands still, or forgets', () => {
  it('members stay while it is stopped, and are the same after that', async () => {
    const server = await RedisServer.start();
    ends.push(() => server.stop());
    const redis = memberServers([server.url], 'single', 'kvtier:', usualLimitMs);
    const reading = read(redis);
    await announced(redis, worker('a'));
    await announced(redis, worker('b'));
    await until(() => reading.names().length === 2, 'both');
    server.signal('SIGSTOP');
    await until(() => reading.problems.length === 1, 'a problem');
    // Longer than all leases.
    await new Promise((resolve) => setTimeout(resolve, leaseMs + 1_000));
    server.signal('SIGCONT');
    await until(() => reading.problems.length === 2, 'all is well');
    await announced(redis, worker('c'));
    await until(() => reading.names().length === 3, 'the third');
    expect(reading.lost('a', 'b')).toEqual([]);
    expect(reading.problems).toEqual([expect.any(String), undefined]);
    // Started again without its data, too.
    await server.kill();
    await server.start();
    await announced(redis, worker('d'));
    await until(() => reading.names().length === 4, 'the fourth');
    expect(reading.lost('a', 'b', 'c')).toEqual([]);
  });

  it('a member that is gone is out of the list, however often connections end', async () => {
    const server = await RedisServer.start();
    ends.push(() => server.stop());
    const redis = memberServers([server.url]);
    const reading = read(redis);
    const child = await startMember(redis, 'mortal');
    ends.push(() => ended(child));
    await announced(redis, worker('b'));
    await until(() => reading.names().length === 2, 'both');
    child.kill('SIGKILL');
    // A new time to come back each time, for those that can.
    const cutting = setInterval(() => void server.cli('client', 'kill', 'type', 'normal').catch(() => {}), 700);
    ends.push(async () => clearInterval(cutting));
    await until(() => reading.names().join() === 'b', 'who is left', 12_000);
    expect(reading.lost('b')).toEqual([]);
  });

  it('a member that goes while the server is away is out of the list soon after', async () => {
    const server = await RedisServer.start();
    ends.push(() => server.stop());
    const redis = memberServers([server.url], 'single', 'kvtier:', usualLimitMs);
    const reading = read(redis);
    const a = await announced(redis, worker('a'));
    await announced(redis, worker('b'));
    await until(() => reading.names().length === 2, 'both');
    await server.kill();
    await until(() => reading.problems.length === 1, 'a problem');
    const beganMs = performance.now();
    await a.close();
    expect(performance.now() - beganMs, 'an end that waits for nobody').toBeLessThan(2_000);
    await server.start();
    await until(() => reading.problems.length === 2, 'all is well');
    await until(() => reading.names().join() === 'b', 'who is left', 2_000 + leaseMs + slackMs);
    expect(reading.lost('b')).toEqual([]);
  });
});

describe.each(['SIGSTOP', 'SIGKILL'] as const)('a master gets %s', (signal) => {
  it('members stay, their leases are renewed at the new master, and it is in full service within 2 s of the failover: Sentinel and cluster', async () => {
    await Promise.all([failedOver('sentinel'), failedOver('cluster')]);
  });

  async function failedOver(mode: 'sentinel' | 'cluster'): Promise<void> {
    const group: ServerGroup = await (mode === 'sentinel' ? startSentinel() : startCluster());
    ends.push(() => group.stop());
    const redis = memberServers(group.urls, mode, 'kvtier:', usualLimitMs);
    const reading = read(redis);
    const a = await announced(redis, worker('a'));
    await announced(redis, worker('b'));
    await until(() => reading.names().length === 2, 'both');
    const { master, limitMs, newMaster, close } = await failover(mode, group);
    ends.push(async () => close());
    if (signal === 'SIGKILL') await master.kill();
    else master.signal('SIGSTOP');
    const next = await newMaster();
    const others = group.servers.filter((server) => server !== master && server !== next.server);
    const waits = new Waits(next.server, others);
    ends.push(async () => waits.end());
    const failedOverMs = await next.asked.timeMs();
    // Of one that nothing wakes. What the old master said ends before.
    const leaseRenewed = next.asked
      .leaseFrom('worker:b', failedOverMs + leaseMs)
      .then((endMs) => endMs - leaseMs - failedOverMs - waits.ms);
    const draining = a.drain(20_000);
    await until(() => reading.told.at(-1)!.workers[0]!.draining, 'a change is seen', 20_000);
    const tookMs = (await next.asked.timeMs()) - failedOverMs - waits.ms;
    await draining;
    const renewedMs = await leaseRenewed;
    await announced(redis, worker('c'));
    await until(() => reading.names().join() === 'a,b,c', 'who came after it');
    await until(() => reading.problems.length === 0 || reading.problems.at(-1) === undefined, 'all is well');
    // Whose master comes back, and is none any more.
    if (signal === 'SIGSTOP') master.signal('SIGCONT');
    else await master.start();
    await new Promise((resolve) => setTimeout(resolve, leaseMs + 500));
    await until(() => reading.names().join() === 'a,b,c', 'all three');
    expect(reading.lost('a', 'b'), `${mode}: members that were lost on the way`).toEqual([]);
    expect(tookMs, mode).toBeLessThan(limitMs);
    // Three times in a lease, and it may just have been.
    expect(renewedMs, mode).toBeLessThan(limitMs + leaseMs / 3);
    if (process.env.KVTIER_REPORT)
      process.stderr.write(
        `${mode} ${signal}: ${tookMs.toFixed(0)} ms after the failover, renewed after ${renewedMs.toFixed(0)} ms\n`,
      );
  }
});

async function ended(child: ChildProcess): Promise<void> {
  if (child.exitCode !== null || child.signalCode !== null) return;
  child.kill('SIGKILL');
  await once(child, 'exit');
}
