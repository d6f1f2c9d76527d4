/** A discovery that tests speak through, and workers of all kinds for a fleet to find. */
import { type Membership, type WorkerRecord, workerRecordSchema } from '@kvtier/config';
import type { Discovery, DiscoveryListener } from '../discovery.ts';

export class SpokenDiscovery implements Discovery {
  readonly kind = 'spoken';
  #listener: DiscoveryListener | undefined;

  async start(listener: DiscoveryListener): Promise<void> {
    this.#listener = listener;
  }

  /** These are the workers, from now on. */
  say(...workers: (Partial<WorkerRecord> & { name: string; address: string })[]): void {
    this.#listener?.changed({ workers: workers.map((one) => workerRecordSchema.parse(one)), nodes: [] });
  }

  members(members: Membership): void {
    this.#listener?.changed(members);
  }

  problem(why: string | undefined): void {
    this.#listener?.problem(why);
  }

  async close(): Promise<void> {
    this.#listener = undefined;
  }
}
