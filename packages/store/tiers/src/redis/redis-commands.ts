/**
 * The commands' way to Redis: the scripts and commands of a partition, on the server that has it. Invariants: every call ends within
 * the time limit; replies of one partition come in the order in which the server made them (one connection a server).
 */
import { KvError, within } from '@kvtier/errors';
import { type RedisAddress, RedisClient, type RedisLogin } from '@kvtier/redis';
import { Cluster, type Redis } from 'ioredis';
import type { Reply } from './replies.ts';
import { allScripts, keyNames, type Script } from './scripts.ts';
import type { RedisSettings } from './settings.ts';

const slotCount = 16_384;
/** A client asks one server after the other who has what: the first may be the one that says nothing. */
const topologyMs = 200;
type Argument = string | number | Buffer;

/** Keys of one partition: one hash tag, one slot. */
export interface Partition {
  readonly index: number;
  /** "kvtier:{p0}:" */
  readonly base: string;
  readonly keys: readonly string[];
  readonly slot: number;
}

export class RedisCommands {
  readonly #client: RedisClient;
  readonly #settings: RedisSettings;

  /** Begins to connect. KvError CONFIG for what cannot work. `onLost`: the connection to a server ended, or a server was replaced. */
  constructor(settings: RedisSettings, onLost: (reason: string) => void) {
    this.#settings = settings;
    this.#client = new RedisClient(settings, onLost);
  }

  get partitionCount(): number {
    return this.#settings.partitions ?? (this.#settings.mode === 'cluster' ? 16 : 1);
  }

  /** Tags whose slots lie evenly over all slots, so that servers get equal shares. The same at every node. */
  partitions(): Partition[] {
    const count = this.partitionCount;
    return Array.from({ length: count }, (_, index) => {
      let tag = `p${index}`;
      const inShare = (slot: number): boolean => Math.floor((slot * count) / slotCount) === index;
      for (let salt = 0; !inShare(slotOf(tag)); salt++) tag = `p${index}.${salt}`;
      const base = `${this.#settings.keyPrefix}{${tag}}:`;
      return { index, base, keys: keyNames.map((name) => base + name), slot: slotOf(tag) };
    });
  }

  get isReady(): boolean {
    return this.#client.isReady;
  }

  /** Waits until commands can be sent. KvError with the reason, CONFIG when waiting longer will not help. */
  ready(limitMs: number): Promise<void> {
    return this.#client.ready(limitMs);
  }

  /**
   * Has every server know the scripts, so that calling one is one round trip. One of a Cluster that is gone learns them when they are called;
   * so does one that refuses, unless `isStrict`.
   */
  async loadScripts(isStrict: boolean): Promise<void> {
    const isCluster = this.#settings.mode === 'cluster';
    const loadAt = async (server: Redis): Promise<void> => {
      try {
        for (const { lua } of allScripts) await this.#client.ask(() => server.call('SCRIPT', 'LOAD', lua));
      } catch (error) {
        if (!isCluster || !(error instanceof KvError) || (isStrict && !error.retry)) throw error;
      }
    };
    const servers = this.#client.now((client) => (client instanceof Cluster ? client.nodes('master') : [client]));
    await Promise.all(servers.map(loadAt));
  }

  /** KvError IO (retry) when the server does not do it in time. */
  async run(script: Script, partition: Partition, args: readonly Argument[]): Promise<Reply> {
    return await this.#client.run(script, partition.keys, args);
  }

  /** A command on the server of a partition. */
  async command(partition: Partition, name: string, args: readonly Argument[]): Promise<Reply> {
    return (await this.#client.ask((client) => this.#serverIn(client, partition).callBuffer(name, [...args]))) as Reply;
  }

  /** Where values of a partition are, as far as is known; undefined when that slot has no server now. */
  address(partition: Partition): (RedisAddress & { readonly name: string }) | undefined {
    return this.#client.now((client) => {
      if (client instanceof Cluster) {
        const name = client.slots[partition.slot]?.[0];
        return name === undefined ? undefined : addressNamed(name);
      }
      if (this.#settings.mode === 'single') {
        const { host, port, path } = client.options;
        if (path !== undefined && path !== null) return { path, name: path };
        return { host, port, name: `${host}:${port}` };
      }
      // Sentinel: whichever server commands go to now.
      const { remoteAddress, remotePort } = client.stream as { remoteAddress?: string; remotePort?: number };
      if (remoteAddress === undefined || remotePort === undefined) return undefined;
      const name = `${remoteAddress}:${remotePort}`;
      return { host: remoteAddress, port: remotePort, tlsName: this.#client.masterHost, name };
    });
  }

  /** Connect anew: what is connected may be connected to nothing any more. */
  reset(): void {
    this.#client.reset();
  }

  /** The same with the one server of a Cluster that has a partition. */
  resetServer(partition: Partition): void {
    this.#client.now((client) => {
      if (client instanceof Cluster) this.#nodeOf(client, partition)?.disconnect();
    });
  }

  /** For connections of our own. */
  get login(): RedisLogin {
    return this.#client.login;
  }

  /** A value's server said MOVED: ask the cluster anew. */
  refreshTopology(): void {
    this.#client.now((client) => (client instanceof Cluster ? client.refreshSlotsCache(() => {}) : undefined));
  }

  /** Ask the cluster anew which server has what. What is not known in a moment is known later: this waits no longer. */
  async topologyRefreshed(): Promise<void> {
    const asking = new Promise<void>((resolve) => {
      this.#client.now((client) => {
        if (client instanceof Cluster) client.refreshSlotsCache(() => resolve());
        else resolve();
      });
    });
    await within('redis', topologyMs, () => asking).catch(() => {}); // who is asked next says why
  }

  close(): void {
    this.#client.close();
  }

  #serverIn(client: Redis | Cluster, partition: Partition): Redis {
    if (!(client instanceof Cluster)) return client;
    const server = this.#nodeOf(client, partition);
    if (server === undefined)
      throw new KvError('IO', `redis: no server has slot ${partition.slot} now`, { retry: true });
    return server;
  }

  #nodeOf(client: Cluster, partition: Partition): Redis | undefined {
    const name = client.slots[partition.slot]?.[0];
    return client.nodes('master').find((node) => `${node.options.host}:${node.options.port}` === name);
  }
}

/** "host:port" as the cluster announces it; an IPv6 host has colons itself. */
export function addressNamed(name: string): RedisAddress & { readonly name: string } {
  const colon = name.lastIndexOf(':');
  return { host: name.slice(0, colon), port: Number(name.slice(colon + 1)), name };
}

/** CRC-16/XMODEM of a hash tag, modulo the slots: the Cluster specification. */
function slotOf(tag: string): number {
  let crc = 0;
  for (const byte of Buffer.from(tag)) {
    crc ^= byte << 8;
    for (let bit = 0; bit < 8; bit++) crc = crc & 0x8000 ? ((crc << 1) ^ 0x1021) & 0xffff : (crc << 1) & 0xffff;
  }
  return crc % slotCount;
}
