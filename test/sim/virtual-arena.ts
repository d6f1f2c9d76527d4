/**
 * Arenas in plain memory, behind the functions of the native binding that the tiers call on them. Invariant (law 4): JavaScript
 * copies headers in and out of an arena, never payloads; a longer copy is a violation.
 */

import { type ArenaHandle, native } from '@kvtier/data-plane';
import { decodeHeader, headerBytes, slotBytesFor } from '@kvtier/identity';
import { Violation, type World } from './world.ts';

const identityBytes = 64;
/** For the mutation check: what the native code would deliver if it did not compare payload checksums. */
export const checksums = { areCompared: true };

/** Is the object in `view` the one of this identity (namespace digest, hash padded), whole? The mirror of object_header.h. */
export function isSound(view: Buffer, identity: Buffer, mayBeShorter = false): boolean {
  const objectBytes = objectBytesIn(view, identity);
  if (objectBytes === undefined) return false;
  if (mayBeShorter ? objectBytes > view.length : Math.ceil(objectBytes / 4096) * 4096 !== view.length) return false;
  const header = decodeHeader(view) as { payloadChecksum: bigint };
  return !checksums.areCompared || native.xxh3_64(view.subarray(headerBytes, objectBytes)) === header.payloadChecksum;
}

/** Header and payload of the object of that identity; undefined: it is another, or none. */
function objectBytesIn(view: Buffer, identity: Buffer): number | undefined {
  const header = decodeHeader(view);
  if ('error' in header) return undefined;
  const hash = Buffer.alloc(32);
  hash.write(header.hash, 'latin1');
  const isIt = identity.subarray(0, 32).equals(header.namespace) && identity.subarray(32, 64).equals(hash);
  return isIt ? headerBytes + header.payloadBytes : undefined;
}

export class VirtualArenas {
  readonly memories = new Map<ArenaHandle, Buffer>();
  readonly #world: World;

  constructor(world: World) {
    this.#world = world;
  }

  create(bytes: number): { readonly handle: ArenaHandle; readonly memory: Buffer } {
    const handle = {} as ArenaHandle;
    const memory = Buffer.alloc(bytes);
    this.memories.set(handle, memory);
    return { handle, memory };
  }

  /** What replaces functions of the native binding. */
  readonly native = {
    arenaWrite: (handle: ArenaHandle, offset: number, bytes: Buffer): void => {
      this.#mustBeHeader(bytes.length);
      bytes.copy(this.#of(handle), offset);
    },
    arenaRead: (handle: ArenaHandle, offset: number, bytes: number): Buffer => {
      this.#mustBeHeader(bytes);
      return Buffer.from(this.#of(handle).subarray(offset, offset + bytes));
    },
    arenaView: (handle: ArenaHandle, offset: number, bytes: number): Buffer =>
      this.#of(handle).subarray(offset, offset + bytes),
    arenaObjects: (handle: ArenaHandle, slots: Float64Array, identities: Buffer): Float64Array =>
      slots.map((slot, at) => {
        const view = this.#of(handle).subarray(slot);
        const bytes = objectBytesIn(view, identities.subarray(at * identityBytes, (at + 1) * identityBytes));
        return bytes === undefined ? 0 : slotBytesFor(bytes - headerBytes);
      }),
    arenaVerify: (handle: ArenaHandle, slots: Float64Array, bytes: Float64Array, identities: Uint8Array) =>
      new Promise<Uint8Array>((resolve) => {
        const memory = this.#of(handle);
        const all = Buffer.from(identities);
        const verify = (): void =>
          resolve(
            Uint8Array.from(slots, (slot, at) => {
              const identity = all.subarray(at * identityBytes, (at + 1) * identityBytes);
              return isSound(memory.subarray(slot, slot + bytes[at]!), identity, true) ? 0 : 1;
            }),
          );
        this.#world.schedule(this.#world.between(5, 200), 'verify', verify);
      }),
  };

  #of(handle: ArenaHandle): Buffer {
    return this.memories.get(handle)!;
  }

  #mustBeHeader(bytes: number): void {
    if (bytes > headerBytes) throw new Violation(`law 4: ${bytes} bytes copied between an arena and JavaScript`);
  }
}
