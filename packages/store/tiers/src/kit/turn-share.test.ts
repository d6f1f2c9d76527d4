import { setImmediate as nextTurn } from 'node:timers/promises';
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { rowsPerTurn, TurnShare } from './turn-share.ts';

it('gives each turn its share, in the order of asking, and all of them in the end', async () => {
  const asked = fc.array(fc.integer({ min: 1, max: 2 * rowsPerTurn }), { maxLength: 30 });
  await fc.assert(
    fc.asyncProperty(fc.array(asked, { maxLength: 4 }), async (bursts) => {
      const turns: number[][] = [[]];
      let isOver = false;
      // First in each turn: what is told in it comes later.
      const begin = (): void => {
        turns.push([]);
        if (!isOver) setImmediate(begin);
      };
      setImmediate(begin);
      const share = new TurnShare();
      const given: number[] = [];
      const ask = async (rows: number, mine: number): Promise<void> => {
        await share.take(rows);
        given.push(mine);
        turns.at(-1)!.push(rows);
      };
      const all: Promise<void>[] = [];
      for (const burst of bursts) {
        for (const rows of burst) all.push(ask(rows, all.length));
        await nextTurn();
      }
      await Promise.all(all);
      isOver = true;
      expect(given).toEqual(all.map((_, i) => i));
      // Whoever comes last in a turn may go beyond it, nobody after him.
      for (const rows of turns) expect(rows.slice(0, -1).reduce((a, b) => a + b, 0)).toBeLessThan(rowsPerTurn);
    }),
    { numRuns: 200 },
  );
});
