/** Members that keep themselves in a list in Redis (@kvtier/membership). */
import type { RedisDiscoveryConfig } from '@kvtier/config';
import { MemberReader } from '@kvtier/membership';
import type { Log } from '@kvtier/runtime';
import { tellRenewed } from '@kvtier/telemetry';
import type { Discovery, DiscoveryListener } from './discovery.ts';
import { Told } from './told.ts';

export class RedisDiscovery implements Discovery {
  readonly kind = 'redis';
  readonly #config: Omit<RedisDiscoveryConfig, 'kind'>;
  readonly #log: Log;
  #reader: MemberReader | undefined;
  #told: Told | undefined;

  constructor(config: Omit<RedisDiscoveryConfig, 'kind'>, log: Log) {
    this.#config = config;
    this.#log = log;
  }

  async start(listener: DiscoveryListener): Promise<void> {
    const told = new Told(listener, this.#log);
    this.#told = told;
    const log = this.#log;
    const lines = { info: (line: string) => log.info({}, line), warn: (line: string) => log.warn({}, line) };
    const onProblem = tellRenewed(lines, 'discovery: passwords, certificates');
    this.#reader = new MemberReader({
      ...this.#config,
      redis: { ...this.#config.redis, place: 'discovery.redis', onProblem },
      log,
      changed: (members) => told.members(members),
      problem: (why) => told.problem(why),
    });
  }

  async close(): Promise<void> {
    this.#told?.close();
    await this.#reader?.close();
  }
}
