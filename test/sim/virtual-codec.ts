/**
 * What the codec tier calls outside of JavaScript: LZ4 in libuv's pool, byte planes and checksums in native code. The work is the real
 * one (planes: its mirror), done in the very event in which the call ends; each node has a pool of its own, and a short queue for it.
 */
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { PoolTurns } from '@kvtier/tiers/testing';
import { compressSync, uncompressSync } from 'lz4-napi';
import type { VirtualArenas } from './virtual-arena.ts';
import type { Life, World } from './world.ts';

/** Planes of one node that wait for the pool: enough for one chain, and too few for several now and then. */
const mostWaiting = 24;

export class VirtualCodec {
  readonly #world: World;
  readonly #arenas: VirtualArenas;
  readonly counts = { compressed: 0, uncompressed: 0, busy: 0 };

  constructor(world: World, arenas: VirtualArenas) {
    this.#world = world;
    this.#arenas = arenas;
  }

  /** What replaces the calls of the library. */
  readonly lz4 = {
    compress: (bytes: Buffer): Promise<Buffer> =>
      this.#call('compress', () => {
        this.counts.compressed++;
        return compressSync(bytes);
      }),
    uncompress: (bytes: Buffer): Promise<Buffer> =>
      this.#call('uncompress', () => {
        this.counts.uncompressed++;
        return uncompressSync(bytes);
      }),
  };

  /** What replaces functions of the native binding. */
  readonly native = {
    arenaSplitPlanes: (handle: ArenaHandle, offset: number, bytes: number, width: number): Promise<Buffer> =>
      this.#call('split planes', () => {
        const memory = this.#of(handle);
        const count = bytes / width;
        return Buffer.from(
          Uint8Array.from(
            { length: bytes },
            (_, at) => memory[offset + (at % count) * width + Math.floor(at / count)]!,
          ),
        );
      }),
    arenaJoinPlanes: (handle: ArenaHandle, offset: number, planes: readonly Uint8Array[]): Promise<void> =>
      this.#call('join planes', () => {
        const memory = this.#of(handle);
        for (const [plane, bytes] of planes.entries())
          for (const [at, byte] of bytes.entries()) memory[offset + at * planes.length + plane] = byte;
      }),
    arenaChecksum: (handle: ArenaHandle, offsets: Float64Array, bytes: number): Promise<BigUint64Array> =>
      this.#call('checksum', () => {
        const memory = this.#of(handle);
        return BigUint64Array.from(offsets, (offset) => native.xxh3_64(memory.subarray(offset, offset + bytes)));
      }),
  };

  /** What replaces the one pool of a process. */
  readonly pool = (() => {
    const { run } = PoolTurns.prototype;
    const pools = new WeakMap<Life, PoolTurns>();
    return {
      run: <T>(call: () => Promise<T>, isUrgent: boolean): Promise<T> | undefined => {
        const { life } = this.#world;
        const pool = pools.get(life) ?? new PoolTurns(2, mostWaiting);
        pools.set(life, pool);
        const running = run.call(pool, call as () => Promise<unknown>, isUrgent) as Promise<T> | undefined;
        if (running === undefined) this.counts.busy++;
        return running;
      },
    };
  })();

  #of(handle: ArenaHandle): Buffer {
    return this.#arenas.memories.get(handle)!;
  }

  #call<T>(what: string, work: () => T): Promise<T> {
    return new Promise((resolve, reject) => {
      const end = (): void => {
        try {
          resolve(work());
        } catch (error) {
          reject(error);
        }
      };
      this.#world.schedule(this.#world.between(5, 300), what, end);
    });
  }
}
