/** Whether blocks of the arena are what their headers say. */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import { type HashKey, headerBytes, type Namespace } from '@kvtier/identity';
import { identitiesOf } from '../disk/disk-io.ts';

/** Header, name, length and checksum of each, by native code and off the JavaScript thread; true: it is sound. */
export async function verifyBlocks(
  arena: ArenaHandle,
  namespace: Namespace,
  blocks: readonly { readonly hash: HashKey; readonly slot: number; readonly payloadBytes: number }[],
): Promise<boolean[]> {
  const faults = await native.arenaVerify(
    arena,
    Float64Array.from(blocks, ({ slot }) => slot),
    Float64Array.from(blocks, ({ payloadBytes }) => headerBytes + payloadBytes),
    identitiesOf(
      namespace,
      blocks.map(({ hash }) => hash),
    ),
  );
  return Array.from(faults, (fault) => fault === 0);
}
