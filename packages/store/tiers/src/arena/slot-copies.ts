/**
 * The arena as any other tier: blocks are copied in and out through slots of the same arena. (The store publishes in place, and pins.)
 * Invariant: a block is pinned while it is copied out, and nothing is 'ready' but what was verified where it was copied to.
 */
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { decodeHeader, type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import type { ArenaSlots } from '../disk/options.ts';
import type { ReadStatus, SlotBlock, Tier, WriteStatus } from '../kit/tier.ts';
import type { ArenaBlock, BlockFields } from './arena-block.ts';

/** What the arena tier offers beyond copies. */
interface Arena extends Pick<ArenaSlots, 'allocate' | 'free' | 'slotBytesOf'>, Pick<Tier, 'remove'> {
  get(namespace: Namespace, hash: HashKey): ArenaBlock | undefined;
  publish(namespace: Namespace, block: BlockFields, slot: number): void;
  pin(namespace: Namespace, hash: HashKey): void;
  unpin(namespace: Namespace, hash: HashKey): void;
}

/** Copies the object in `slot` to a slot of its own. */
export async function copyIn(
  tier: Arena,
  arena: ArenaHandle,
  namespace: Namespace,
  { hash, slot: source }: SlotBlock,
): Promise<WriteStatus> {
  if (tier.get(namespace, hash) !== undefined) return 'held';
  const header = decodeHeader(native.arenaRead(arena, source, headerBytes));
  if ('error' in header || header.hash !== hash) return 'refused';
  const slot = tier.allocate(namespace, header.payloadBytes);
  if (slot === undefined) return 'refused';
  await native.arenaCopy(
    arena,
    Float64Array.of(source + headerBytes),
    Float64Array.of(slot + headerBytes),
    header.payloadBytes,
  );
  if (tier.get(namespace, hash) !== undefined) {
    tier.free(slot);
    return 'held';
  }
  const { parent, tokenCount, payloadBytes, payloadChecksum: checksum, expiresS } = header;
  tier.publish(namespace, { hash, parent, tokenCount, payloadBytes, checksum, expiresS }, slot);
  return 'stored';
}

/** Copies a block into `slot`. */
export async function copyOut(
  tier: Arena,
  arena: ArenaHandle,
  namespace: Namespace,
  { hash, slot: target }: SlotBlock,
): Promise<ReadStatus> {
  const block = tier.get(namespace, hash);
  const bytes = headerBytes + (block?.payloadBytes ?? 0);
  if (block === undefined || bytes > tier.slotBytesOf(target)) return 'missing';
  tier.pin(namespace, hash);
  try {
    await native.arenaCopy(arena, Float64Array.of(block.slot), Float64Array.of(target), bytes);
    const [checksum] = await native.arenaChecksum(arena, Float64Array.of(target + headerBytes), block.payloadBytes);
    const header = decodeHeader(native.arenaRead(arena, target, headerBytes));
    const sound =
      !('error' in header) &&
      header.hash === hash &&
      Buffer.compare(header.namespace, namespace.digest) === 0 &&
      header.payloadBytes === block.payloadBytes &&
      header.payloadChecksum === checksum;
    if (sound) return 'ready';
    tier.remove(namespace, [hash], 'corrupt');
    return 'corrupt';
  } finally {
    tier.unpin(namespace, hash);
  }
}
