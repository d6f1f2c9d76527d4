/**
 * Brings blocks out of packs into arena slots: neighbours in a pack travel as one ranged GET, several at a time, each object
 * verified off the JavaScript thread. Invariant: a slot is reported only when no byte can arrive in it any more.
 */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import type { ArenaMemory } from '../arena/arena-memory.ts';
import { identitiesOf } from '../disk/disk-io.ts';
import { verdictOf } from '../kit/faults.ts';
import { settled } from '../kit/settled.ts';
import type { ReadStatus } from '../kit/tier.ts';
import { packKey } from './discovery.ts';
import type { Pack, PackEntry } from './pack-index.ts';
import type { S3Api } from './s3-api.ts';

/** Neighbours are joined up to this: enough that a request's cost is small, and several travel at a time. */
const rangeBytes = 8 << 20;

const statuses = { sound: 'ready', foreign: 'missing', wrong: 'corrupt' } as const;

export interface WantedBlock {
  readonly index: number;
  readonly slot: number;
  readonly entry: PackEntry;
}

export interface PackReaderOptions {
  readonly api: S3Api;
  readonly arena: ArenaHandle;
  readonly memory: ArenaMemory;
  readonly onGone: (pack: Pack) => void;
  /** The server does not give it, has said so twice, and to ask again would not help. false: that may be the server's fault. */
  readonly onRefused: (pack: Pack, why: KvError) => boolean;
  readonly onCorrupt: (entry: PackEntry) => void;
  /** It is sound, and a newer program's. */
  readonly onForeign: (entry: PackEntry) => void;
}

export class PackReader {
  readonly #options: PackReaderOptions;
  /** When the server refused a pack that it has not given since: one such reply may be a proxy's, or of a moment. */
  readonly #refusedMs = new WeakMap<Pack, number>();

  constructor(options: PackReaderOptions) {
    this.#options = options;
  }

  /** `onDone` once per block; settles after the last, by a rejection, too. */
  async read(
    wanted: readonly WantedBlock[],
    deadlineMs: number,
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    await settled(runsOf(wanted).map((run) => this.#readRun(run, deadlineMs, onDone)));
  }

  async #readRun(
    run: readonly WantedBlock[],
    deadlineMs: number,
    onDone: (index: number, status: ReadStatus) => void,
  ): Promise<void> {
    const { arena, onCorrupt, onForeign } = this.#options;
    const end = (status: ReadStatus): void => {
      for (const { index } of run) onDone(index, status);
    };
    const failure = await this.#get(run, deadlineMs);
    if (failure !== undefined) {
      end(failure);
      return;
    }
    let faults: Uint8Array;
    try {
      faults = await native.arenaVerify(
        arena,
        Float64Array.from(run, ({ slot }) => slot),
        Float64Array.from(run, ({ entry }) => entry.bytes),
        Buffer.concat(run.map(({ entry }) => identitiesOf(entry.namespace, [entry.hash]))),
      );
    } catch (error) {
      if (!(error instanceof KvError)) throw error;
      end('failed');
      return;
    }
    for (const [at, { index, entry }] of run.entries()) {
      const verdict = verdictOf(faults[at]!);
      if (verdict === 'wrong') onCorrupt(entry);
      else if (verdict === 'foreign') onForeign(entry);
      onDone(index, statuses[verdict]);
    }
  }

  /** Into the slots; what becomes of these blocks when it does not come. */
  async #get(run: readonly WantedBlock[], deadlineMs: number): Promise<'missing' | 'failed' | undefined> {
    const { api, memory, onGone, onRefused } = this.#options;
    const { pack, offset } = run[0]!.entry;
    const targets = run.map(({ slot, entry }) => memory.view(slot, entry.bytes));
    const beganMs = performance.now();
    try {
      if (await api.get(packKey(pack.slot), pack.etag, offset, targets, deadlineMs)) {
        this.#refusedMs.delete(pack);
        return undefined;
      }
      onGone(pack);
      return 'missing';
    } catch (error) {
      if (!(error instanceof KvError)) throw error;
      if (error.retry) return 'failed';
      const refusedMs = this.#refusedMs.get(pack);
      this.#refusedMs.set(pack, refusedMs ?? performance.now());
      // What was asked for before the first refusal is no second one.
      const isAgain = refusedMs !== undefined && beganMs > refusedMs;
      return isAgain && onRefused(pack, error) ? 'missing' : 'failed';
    }
  }
}

/** What lies side by side in one pack, in pieces of about `rangeBytes`. */
function runsOf(wanted: readonly WantedBlock[]): WantedBlock[][] {
  const sorted = [...wanted].sort((a, b) => a.entry.pack.slot - b.entry.pack.slot || a.entry.offset - b.entry.offset);
  const runs: WantedBlock[][] = [];
  let runBytes = 0;
  let before: PackEntry | undefined;
  for (const block of sorted) {
    const { entry } = block;
    const continues =
      before?.pack === entry.pack &&
      before.offset + before.bytes === entry.offset &&
      runBytes + entry.bytes <= rangeBytes;
    if (continues) runs.at(-1)!.push(block);
    else {
      runs.push([block]);
      runBytes = 0;
    }
    runBytes += entry.bytes;
    before = entry;
  }
  return runs;
}
