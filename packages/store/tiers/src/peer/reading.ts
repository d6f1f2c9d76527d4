/**
 * One read of blocks from peers, as columns and not as an object per block: blocks may be small, and tens of thousands come in
 * a second. Invariant: each block ends once; the promise is fulfilled when all have.
 */
import { invariant } from '@kvtier/errors';
import type { Namespace } from '@kvtier/identity';
import { identitiesOf } from '../disk/disk-io.ts';
import type { ReadStatus, SlotBlock } from '../kit/tier.ts';
import { type PeerBits, PeerSet } from './directory.ts';
import type { FetchBlocks } from './peer-loops.ts';

/** What was seen of a block while it was sought. */
export const seenFailure = 1;
export const seenCorrupt = 2;

const nobody = new PeerSet();

export class Reading implements FetchBlocks {
  readonly namespace: Namespace;
  readonly blocks: readonly SlotBlock[];
  readonly identities: Uint8Array;
  readonly slots: Float64Array;
  readonly slotBytes: Float64Array;
  /** Of the attempt that is being made. */
  readonly deadlinesMs: Float64Array;
  /** Of the read. */
  readonly deadlineMs: number;
  /** By block, made when the first one is needed: peers that did not deliver. */
  readonly #tried: (PeerSet | undefined)[] = [];
  readonly seen: Uint8Array;
  readonly ended: Promise<void>;
  readonly #onDone: (index: number, status: ReadStatus) => void;
  #open: number;
  #resolve: () => void = () => {};

  constructor(
    namespace: Namespace,
    blocks: readonly SlotBlock[],
    slotBytesOf: (slot: number) => number,
    deadlineMs: number,
    onDone: (index: number, status: ReadStatus) => void,
  ) {
    const count = blocks.length;
    this.namespace = namespace;
    this.blocks = blocks;
    this.deadlineMs = deadlineMs;
    this.slots = new Float64Array(count);
    this.slotBytes = new Float64Array(count);
    this.deadlinesMs = new Float64Array(count).fill(deadlineMs);
    this.seen = new Uint8Array(count);
    this.identities = identitiesOf(
      namespace,
      blocks.map(({ hash }) => hash),
    );
    for (let i = 0; i < count; i++) {
      this.slots[i] = blocks[i]!.slot;
      this.slotBytes[i] = slotBytesOf(blocks[i]!.slot);
    }
    this.#onDone = onDone;
    this.#open = count;
    this.ended = new Promise((resolve) => {
      this.#resolve = resolve;
    });
  }

  triedAt(index: number): Pick<PeerSet, 'has'> {
    return this.#tried[index] ?? nobody;
  }

  /** It did not deliver this one. */
  wasTried(index: number, bits: PeerBits): void {
    const tried = this.#tried[index] ?? new PeerSet();
    tried.add(bits);
    this.#tried[index] = tried;
  }

  end(index: number, status: ReadStatus): void {
    invariant(this.#open > 0, 'peer: a read ended twice');
    this.#onDone(index, status);
    if (--this.#open === 0) this.#resolve();
  }
}
