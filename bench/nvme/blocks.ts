/** Objects of one size in the slots of an arena, under new names as often as a bench wants, and those of them that a tier holds. */
import { randomFillSync } from 'node:crypto';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { encodeHeader, type HashKey, headerBytes, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import type { ArenaTier, DiskTier, SlotBlock } from '@kvtier/tiers';

export const benchNamespace: Namespace = namespaceFromDigest(Buffer.alloc(32, 0xbe));

export class Blocks {
  /** What was written last, oldest first. */
  readonly written: HashKey[] = [];
  readonly payloadBytes: number;
  readonly slots: readonly number[];
  readonly #arena: ArenaHandle;
  readonly #checksum: bigint;

  /** `count` slots, all with the same payload. */
  constructor(arena: ArenaHandle, tier: ArenaTier, payloadBytes: number, count: number) {
    this.#arena = arena;
    this.payloadBytes = payloadBytes;
    const payload = randomFillSync(Buffer.alloc(payloadBytes));
    this.#checksum = native.xxh3_64(payload);
    this.slots = Array.from({ length: count }, () => tier.allocate(benchNamespace, payloadBytes)!);
    for (const slot of this.slots) native.arenaWrite(arena, slot + headerBytes, payload);
  }

  /** New names for what is in the slots from `first` on: what an engine's commit does. */
  rename(first = 0, count = this.slots.length): SlotBlock[] {
    const names = randomFillSync(Buffer.alloc(32 * count)).toString('latin1');
    const blocks = this.slots.slice(first, first + count).map((slot, i): SlotBlock => {
      const hash = names.slice(i * 32, i * 32 + 32) as HashKey;
      const header = encodeHeader({
        ...{ namespace: benchNamespace.digest, hash, parent: null, tokenCount: 16 },
        ...{ payloadBytes: this.payloadBytes, payloadChecksum: this.#checksum },
      });
      native.arenaWrite(this.#arena, slot, header);
      return { hash, slot };
    });
    for (const { hash } of blocks) this.written.push(hash);
    return blocks;
  }

  /** `count` of the blocks that the tier holds: a chain that begins anywhere, or from everywhere. */
  pick(tier: DiskTier, order: 'chain' | 'random', count = this.slots.length): SlotBlock[] {
    const held = this.written.filter((hash) => tier.lookup(benchNamespace, [hash]) === 1);
    const first = Math.floor(Math.random() * Math.max(1, held.length - count));
    return this.slots.slice(0, count).map((slot, i) => {
      const at = order === 'chain' ? first + i : Math.floor(Math.random() * held.length);
      return { hash: held[at % held.length]!, slot };
    });
  }
}
