/**
 * Property: whatever a node does, each callback fires exactly once, what a load reports is right byte for byte, no slot
 * is committed with other bytes than its hash's, no block changes under a copy, and every arena is unmapped at the end.
 */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import type { Fault } from './testing/fake-node.ts';
import { hashOf } from './testing/memory.ts';
import { ConnectorRig, fastTimers, until } from './testing/rig.ts';

const faults = fc.oneof(
  { weight: 6, arbitrary: fc.constant<Fault>('none') },
  {
    weight: 4,
    arbitrary: fc.constantFrom<Fault[]>(
      'silent',
      'failure',
      'garbage',
      'foreign',
      'hang up',
      'restart',
      'wrong bytes',
      'wrong order',
      'wrong offset',
      'other epoch',
    ),
  },
);
const operation = fc.record({
  kind: fc.constantFrom(
    'match',
    'load',
    'await',
    'await',
    'end',
    'seed',
    'store',
    'pause',
    'stop',
    'go',
    'kill',
    'start',
  ),
  chain: fc.integer({ min: 0, max: 2 }),
  first: fc.integer({ min: 0, max: 5 }),
  blocks: fc.integer({ min: 1, max: 9 }),
});

it('exactly once, and never wrong', { timeout: 120_000 }, async () => {
  await fc.assert(
    fc.asyncProperty(
      fc.array(operation, { minLength: 1, maxLength: 25 }),
      fc.array(faults, { maxLength: 60 }),
      fc.array(fc.integer({ min: 0, max: 3 }), { minLength: 1, maxLength: 20 }),
      async (operations, script, delays) => {
        const rig = new ConnectorRig({ timers: fastTimers(20), maxStoreBlocks: 20 });
        const { node, executor, connector } = rig;
        node.fault = () => script.shift() ?? 'none';
        let copies = 0;
        executor.beforeCopy = async () => {
          const delay = delays[copies++ % delays.length]!;
          if (delay > 0) await new Promise((resolve) => setTimeout(resolve, delay));
        };
        await rig.attach();
        for (let i = 0; i < 6; i++) node.seed(hashOf(0, i));
        const running: Promise<void>[] = [];
        let up = true;
        let nextBlock = 1;
        let calls = 0;
        let callbacks = 0;
        const check = async (op: (typeof operations)[number]): Promise<void> => {
          const ids = Array.from({ length: op.blocks }, () => nextBlock++ % executor.blocks.length);
          if (ids.some((id) => executor.busy.has(id))) return; // the scheduler never names a block twice
          calls++;
          if (op.kind === 'store') {
            let settled = -1;
            const onSettled = (held: number): void => {
              expect(settled, 'settled twice').toBe(-1);
              settled = held;
            };
            const settling = until(() => settled >= 0, 'a store to settle', 30_000);
            await rig.store(op.chain, op.first, ids, { onSettled });
            callbacks++;
            expect(ids.filter((id) => executor.busy.has(id))).toEqual([]);
            for (const id of ids) executor.blocks[id]!.fill(0xee);
            await settling;
            expect(settled).toBeLessThanOrEqual(op.blocks);
          } else {
            const awaited = op.kind === 'await' ? { stallMs: 400, deadlineMs: 1_500 } : undefined;
            const { loaded, reason } = await rig.load(`r${op.chain}`, op.chain, op.first, ids, undefined, awaited);
            callbacks++;
            if (awaited) expect(reason === '').toBe(loaded === op.blocks);
            expect(loaded).toBeLessThanOrEqual(op.blocks);
            for (let i = 0; i < loaded; i++) expect(rig.holds(ids[i]!, op.chain, op.first + i)).toBe(true);
          }
        };
        for (const op of operations) {
          if (op.kind === 'load' || op.kind === 'await' || op.kind === 'store') running.push(check(op));
          else if (op.kind === 'match') connector.match(`r${op.chain}`, Buffer.alloc(8 * op.blocks), 0);
          else if (op.kind === 'pause') await new Promise((resolve) => setTimeout(resolve, op.blocks));
          else if (op.kind === 'end') rig.endLoad(`r${op.chain}`, op.blocks - 1);
          else if (op.kind === 'seed') node.seed(hashOf(op.chain, op.first));
          else if (op.kind === 'stop') node.stopped = true;
          else if (op.kind === 'go') node.go();
          else if (op.kind === 'kill' && up) {
            up = false;
            await node.kill();
          } else if (op.kind === 'start' && !up) {
            up = true;
            await node.start();
          }
        }
        await Promise.all(running);
        expect(callbacks).toBe(calls);
        node.go();
        await until(() => connector.storingBlocks === 0, 'stores to settle');
        await rig.close();
        expect(executor.mapped.size).toBe(0);
        expect(executor.copiesInFlight).toBe(0);
        expect(node.wrongs).toEqual([]);
        expect(callbacks).toBe(calls);
      },
    ),
    { numRuns: 100 },
  );
});
