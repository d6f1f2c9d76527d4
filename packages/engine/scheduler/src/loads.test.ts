/** Loads by themselves, against a connector that keeps no promise of when it calls back. */
import type { PrefixCache } from '@kvtier/prefix-cache';
import { expect, it } from 'vitest';
import { type ArrivedLoad, noConnector } from './connector.ts';
import { type LoadEnd, Loads } from './loads.ts';
import type { EngineRequest } from './request.ts';
import { EngineWorld } from './testing/world.ts';

it('the end of a load that its request has left behind for another ends nothing of that one', () => {
  const { clock } = new EngineWorld(1);
  const done: ((loaded: number) => void)[] = [];
  const ends: (LoadEnd | undefined)[] = [];
  const arrived: ArrivedLoad = {
    blocks: { arena: 1, blockIds: Int32Array.of(), offsets: new Float64Array(0), checksums: new BigUint64Array(0) },
    live: true,
    import: (step) => step(),
    decline: () => expect.unreachable(),
  };
  const loads = new Loads({
    kv: { blockTables: () => [[1, 2, 3]], free: () => expect.unreachable() } as unknown as PrefixCache,
    connector: {
      ...noConnector,
      load: (_id, _hashes, _first, _blocks, onDone, onArrived) => {
        done.push((loaded) => onDone({ loaded, byTier: {}, elapsedUs: 1 }));
        onArrived?.(arrived);
      },
    },
    clock,
    deadlineMs: 1_000,
    onEnd: (_request, end) => ends.push(end),
    onArrived: () => true,
    onFreed: () => expect.unreachable(),
  });
  const request = { id: 'r', hashes: { packed: Buffer.alloc(0) } } as unknown as EngineRequest;
  loads.start(request, 0, 3);
  loads.takeArrived(request); // its step is over, and the request was preempted and loads again
  loads.start(request, 0, 2);
  expect(loads.count).toBe(1);
  done[0]!(3);
  expect([ends, loads.count, loads.blocks]).toEqual([[], 1, 2]);
  done[1]!(1);
  expect([ends.map((end) => end?.loaded), loads.count, loads.blocks]).toEqual([[1], 0, 0]);
});

it('a load whose request is gone ends before its offer is declined: what is declined alone is copied', () => {
  const { clock } = new EngineWorld(1);
  const order: string[] = [];
  const arrived: ArrivedLoad = {
    blocks: { arena: 1, blockIds: Int32Array.of(), offsets: new Float64Array(0), checksums: new BigUint64Array(0) },
    live: true,
    import: (step) => step(),
    decline: () => order.push('declined'),
  };
  const loads = new Loads({
    kv: { blockTables: () => [[1, 2, 3]] } as unknown as PrefixCache,
    connector: {
      ...noConnector,
      load: (_id, _hashes, _first, _blocks, _onDone, onArrived) => onArrived?.(arrived),
      endLoad: (id, blocks) => order.push(`${id} ends with ${blocks}`),
    },
    clock,
    deadlineMs: 1_000,
    onEnd: () => expect.unreachable(),
    onArrived: () => true,
    onFreed: () => expect.unreachable(),
  });
  const request = { id: 'r', hashes: { packed: Buffer.alloc(0) } } as unknown as EngineRequest;
  loads.start(request, 0, 3);
  loads.abandon(request);
  expect(order).toEqual(['r ends with 0', 'declined']);
});
