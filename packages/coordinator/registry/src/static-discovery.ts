/** Members that somebody else knows: the configuration, or the program that runs them. */
import type { Membership } from '@kvtier/config';
import type { Log } from '@kvtier/runtime';
import type { Discovery, DiscoveryListener } from './discovery.ts';
import { Told } from './told.ts';

export class StaticDiscovery implements Discovery {
  readonly kind = 'static';
  readonly #log: Log;
  #members: Membership;
  #told: Told | undefined;

  constructor(members: Membership, log: Log) {
    this.#members = members;
    this.#log = log;
  }

  async start(listener: DiscoveryListener): Promise<void> {
    const told = new Told(listener, this.#log);
    this.#told = told;
    setImmediate(() => told.members(this.#members));
  }

  /** Other members from now on; whoever knows them has parsed them. */
  replace(members: Membership): void {
    this.#members = members;
    setImmediate(() => this.#told?.members(this.#members));
  }

  async close(): Promise<void> {
    this.#told?.close();
  }
}
