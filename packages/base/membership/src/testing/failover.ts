/**
 * For tests with real servers: the failover of the master that has the list, by the servers' own clocks, and what a busy machine adds to
 * what comes after it.
 */
import { readFileSync } from 'node:fs';
import { RedisClient } from '@kvtier/redis';
import { Watch } from '@kvtier/runtime';
import { type RedisServer, type ServerGroup, until } from '../../../../../infra/redis/servers.ts';

const patienceMs = 20_000;

/** A server that is asked over one connection: a process for each question would take longer than what is measured. */
class Asked {
  readonly #client: RedisClient;

  constructor({ url }: RedisServer) {
    const settings = { mode: 'single', servers: [url], database: 0, timeLimitMs: patienceMs } as const;
    this.#client = new RedisClient(settings, () => {});
  }

  close(): void {
    this.#client.close();
  }

  async say(command: string, ...args: string[]): Promise<unknown> {
    await this.#client.ready(patienceMs);
    return await this.#client.ask((redis) => redis.call(command, args));
  }

  /** By its clock. */
  async timeMs(): Promise<number> {
    const [seconds, us] = (await this.say('time')) as [string, string];
    return Number(seconds) * 1_000 + Number(us) / 1_000;
  }

  /** The end of a member's lease, when it is not before `leastMs` any more: by its clock, too. */
  async leaseFrom(member: string, leastMs: number): Promise<number> {
    let endMs = 0;
    const isRenewed = async (): Promise<boolean> => {
      endMs = Number(await this.say('zscore', 'kvtier:{members}:leases', member));
      return endMs >= leastMs;
    };
    await until(isRenewed, 'its lease is renewed at the new master', patienceMs);
    return endMs;
  }
}

/** What a busy machine adds: the time that this process, in which members and readers live, stands still, and servers wait for a CPU. */
export class Waits {
  readonly #watch = new Watch(10, () => {});
  readonly #lostMs = (): number => performance.now() - this.#watch.nowMs();
  readonly #before: readonly number[];
  readonly #servers: readonly RedisServer[];

  /** `master` is asked after one of the others. */
  constructor(master: RedisServer, others: readonly RedisServer[]) {
    this.#servers = [master, ...others];
    this.#before = [this.#lostMs(), ...this.#servers.map(queuedMs)];
  }

  /** Since it was made. */
  get ms(): number {
    const now = [this.#lostMs(), ...this.#servers.map(queuedMs)];
    const [own, master, ...others] = now.map((ms, i) => ms - this.#before[i]!);
    return own! + master! + Math.max(...others);
  }

  end(): void {
    this.#watch.stop();
  }
}

/** What a process has stood in the queue for a CPU, as the kernel counts it. */
const queuedMs = ({ pid }: RedisServer): number =>
  Number(readFileSync(`/proc/${pid}/schedstat`, 'latin1').split(' ')[1]) / 1e6;

interface Failover {
  /** That has the list. */
  readonly master: RedisServer;
  /** Of full service, from the failover on. */
  readonly limitMs: number;
  /** Which one has it next, once others know that. */
  newMaster(): Promise<{ readonly server: RedisServer; readonly asked: Asked }>;
  close(): void;
}

export async function failover(mode: 'sentinel' | 'cluster', group: ServerGroup): Promise<Failover> {
  const asked = new Map(group.servers.map((server) => [server, new Asked(server)]));
  const close = (): void => {
    for (const each of asked.values()) each.close();
  };
  if (mode === 'sentinel') {
    const [master, replica, ...sentinels] = group.servers;
    const isNamed = async (): Promise<boolean> => {
      const named = sentinels.map((one) => asked.get(one)!.say('sentinel', 'get-master-addr-by-name', 'kvtier'));
      return (await Promise.all(named)).some((place) => Number((place as [string, string])[1]) === replica!.port);
    };
    return {
      close,
      master: master!,
      // Sentinels take up to a second to see the new master, which is theirs: a client's time begins with the first that names it.
      limitMs: 1_500,
      newMaster: async () => {
        await until(isNamed, 'the failover');
        return { server: replica!, asked: asked.get(replica!)! };
      },
    };
  }
  const first = asked.get(group.servers[0]!)!;
  const slot = Number(await first.say('cluster', 'keyslot', 'kvtier:{members}:records'));
  const ownerBy = async (server: RedisServer): Promise<RedisServer | undefined> => {
    const ranges = (await asked.get(server)!.say('cluster', 'slots')) as [number, number, [string, number]][];
    const range = ranges.find(([from, to]) => from <= slot && slot <= to);
    return group.servers.find(({ port }) => port === range?.[2][1]);
  };
  const master = (await ownerBy(group.servers[0]!))!;
  const witness = group.servers.find((server) => server !== master)!;
  return {
    close,
    master,
    limitMs: 2_000,
    newMaster: async () => {
      let next: RedisServer | undefined;
      await until(async () => {
        next = await ownerBy(witness);
        const info = String(await asked.get(witness)!.say('cluster', 'info'));
        return next !== undefined && next !== master && info.includes('cluster_state:ok');
      }, 'the failover');
      return { server: next!, asked: asked.get(next!)! };
    },
  };
}
