/**
 * The product's code runs unchanged; what it stands on is exchanged while a world runs: timers, clocks, randomness, the
 * native functions that reach disks, and the outermost layer of the clients of Redis and S3.
 *
 * Invariants: `install` and `uninstall` are balanced, and afterwards everything is as before; what the simulation does not know
 * is refused loudly, so that nothing real is waited for.
 */
import crypto from 'node:crypto';
import { syncBuiltinESMExports } from 'node:module';
import { S3Client } from '@aws-sdk/client-s3';
import { native } from '@kvtier/data-plane';
import { Outside } from '@kvtier/errors';
import { stepping } from '@kvtier/placement';
import { slicing } from '@kvtier/tiers';
import { NativePool, PiecePool } from '@kvtier/tiers/redis/testing';
import { HttpPool } from '@kvtier/tiers/s3/testing';
import { lz4Calls, PoolTurns } from '@kvtier/tiers/testing';
import { Redis } from 'ioredis';
import type { VirtualArenas } from './virtual-arena.ts';
import type { VirtualCodec } from './virtual-codec.ts';
import type { VirtualDisks } from './virtual-disk.ts';
import type { VirtualRedis } from './virtual-redis.ts';
import type { VirtualS3 } from './virtual-s3.ts';
import type { Entry, Life, World } from './world.ts';

/** setTimeout's longest; what is longer fires at once, as in Node. */
const longestTimerMs = 2 ** 31 - 1;

/** What setTimeout and setInterval return. */
class VirtualTimer {
  entry: Entry | undefined;
  /** Begins anew. */
  again: () => void = () => {};
  refresh(): this {
    this.again();
    return this;
  }
  ref(): this {
    return this;
  }
  unref(): this {
    return this;
  }
  hasRef(): boolean {
    return true;
  }
}

type Patch = readonly [object: object, name: string, value: unknown];

function timerPatches(world: World): Patch[] {
  const clamp = (ms: number): number => (ms >= 1 && ms <= longestTimerMs ? ms : 1);
  const clear = (timer: unknown): void => {
    if (timer instanceof VirtualTimer && timer.entry !== undefined) world.cancel(timer.entry);
  };
  const setTimeout = (fn: (...args: unknown[]) => void, ms = 1, ...args: unknown[]): VirtualTimer => {
    const timer = new VirtualTimer();
    timer.again = () => {
      clear(timer);
      timer.entry = world.schedule(clamp(ms) * 1000, 'timer', () => fn(...args));
    };
    timer.again();
    return timer;
  };
  const setInterval = (fn: (...args: unknown[]) => void, ms = 1, ...args: unknown[]): VirtualTimer => {
    const timer = new VirtualTimer();
    const again = (): void => {
      timer.entry = world.schedule(clamp(ms) * 1000, 'interval', () => {
        again();
        fn(...args);
      });
    };
    again();
    return timer;
  };
  const immediateUs = new WeakMap<Life, number>();
  const setImmediate = (fn: (...args: unknown[]) => void, ...args: unknown[]): VirtualTimer => {
    const timer = new VirtualTimer();
    // In their order; now and then a turn takes its time.
    const atUs = Math.max(
      immediateUs.get(world.life) ?? 0,
      world.nowUs + (world.chance(0.2) ? world.between(1, 300) : 0),
    );
    immediateUs.set(world.life, atUs);
    timer.entry = world.schedule(atUs - world.nowUs, 'immediate', () => fn(...args));
    return timer;
  };
  return [
    [globalThis, 'setTimeout', setTimeout],
    [globalThis, 'setInterval', setInterval],
    [globalThis, 'setImmediate', setImmediate],
    [globalThis, 'clearTimeout', clear],
    [globalThis, 'clearInterval', clear],
    [globalThis, 'clearImmediate', clear],
    [performance, 'now', () => world.nowMs],
    [Date, 'now', () => Math.floor(world.startMs + world.wallStepMs + world.nowMs)],
    [Math, 'random', () => world.random()],
    [AbortSignal, 'timeout', (ms: number) => abortAfter(world, ms)],
    [
      crypto,
      'randomBytes',
      (count: number) => Buffer.from(Array.from({ length: count }, () => Math.floor(world.random() * 256))),
    ],
  ];
}

function abortAfter(world: World, ms: number): AbortSignal {
  const controller = new AbortController();
  world.schedule(ms * 1000, 'abort', () => controller.abort(new DOMException('time limit', 'TimeoutError')));
  return controller.signal;
}

/** Native calls that end on a thread of their own: here they would be waited for in real time. */
const refused = ['arenaCopy', 'peerOpen', 'valuesConnect'] as const;

export interface Servers {
  readonly arenas: VirtualArenas;
  readonly disks: VirtualDisks;
  readonly redis: VirtualRedis;
  readonly s3: VirtualS3;
  readonly codec: VirtualCodec;
}

/** Exchange the platform for the world; the returned function puts it back. */
export function install(world: World, { arenas, disks, redis, s3, codec }: Servers): () => void {
  const refuse = refused.map(
    (name): Patch => [
      native,
      name,
      () => {
        throw new Error(`simulation: native.${name} is not simulated`);
      },
    ],
  );
  const patches: Patch[] = [
    ...timerPatches(world),
    [slicing, 'blocks', 8],
    [stepping, 'blocks', world.pick([2, 2, 3, 3, 256])],
    [stepping, 'looked', world.pick([2, 3, 5, 1_024])],
    ...refuse,
    ...Object.entries(arenas.native).map(([name, value]): Patch => [native, name, value]),
    ...Object.entries(codec.native).map(([name, value]): Patch => [native, name, value]),
    ...Object.entries(codec.lz4).map(([name, value]): Patch => [lz4Calls, name, value]),
    [PoolTurns.prototype, 'run', codec.pool.run],
    ...Object.entries(redis.native).map(([name, value]): Patch => [native, name, value]),
    ...Object.entries(disks.native).map(([name, value]): Patch => [native, name, value]),
    ...Object.entries(redis.client).map(([name, value]): Patch => [Redis.prototype, name, value]),
    ...Object.entries(s3.http).map(([name, value]): Patch => [HttpPool.prototype, name, value]),
    [Outside.prototype, 'ask', s3.outside(Outside.prototype.ask)],
    ...Object.entries(s3.sdk).map(([name, value]): Patch => [S3Client.prototype, name, value]),
    ...[PiecePool.prototype, NativePool.prototype].flatMap((pool) =>
      Object.entries(redis.pool).map(([name, value]): Patch => [pool, name, value]),
    ),
  ];
  return exchange(patches);
}

/** Timers, clocks and randomness alone: for worlds without cache nodes. */
export const installTime = (world: World): (() => void) => exchange(timerPatches(world));

function exchange(patches: readonly Patch[]): () => void {
  const before = patches.map(([object, name]) => Object.getOwnPropertyDescriptor(object, name));
  for (const [object, name, value] of patches) {
    Object.defineProperty(object, name, { value, configurable: true, writable: true, enumerable: true });
  }
  syncBuiltinESMExports();
  return () => {
    for (const [at, [object, name]] of patches.entries()) {
      const was = before[at];
      if (was === undefined) Reflect.deleteProperty(object, name);
      else Object.defineProperty(object, name, was);
    }
    syncBuiltinESMExports();
  };
}
