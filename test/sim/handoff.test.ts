/** Hand-offs in virtual time: many lives keep all laws, and each of typical defects, planted one by one, is found. */
import { expect, it } from 'vitest';
import { simulateHandOffs } from './handoff-simulation.ts';

it('many worlds keep all laws, and everything happened in them', async () => {
  const tally: Record<string, number> = {};
  for (let seed = 1; seed <= 40; seed++) {
    const result = await simulateHandOffs({ seed });
    expect(result.failure, `npm run sim -- --handoff --seed ${seed}\n${result.lines.join('\n')}`).toBeUndefined();
    for (const [name, count] of Object.entries(result.tally)) tally[name] = (tally[name] ?? 0) + count;
  }
  console.log(tally);
});
