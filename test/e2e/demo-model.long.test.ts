/**
 * The demo's model answers right at every length that it was trained for, about every kind of table: computed, from the
 * engine's own cache and from the tier. A reused block that were wrong would be a wrong answer here.
 */
import { complete, DemoTable, demoKinds, resetPrefixCache } from '@kvtier/cli';
import { expect, it } from 'vitest';
import { Machine } from './kvtier-up.ts';

const blockTokens = 16;
/** Rows, and the tokens of table and question. */
const lengths = [
  [5, 75],
  [82, 999],
  [165, 1995],
  [332, 3999],
] as const;

it('answers about tables of every kind, from 75 to 4,000 tokens, cold and warm', async () => {
  const machine = new Machine();
  try {
    const { url } = await machine.up('--loads', 'always');
    for (const kind of demoKinds) {
      for (const [rows, promptTokens] of lengths) {
        const table = new DemoTable(rows, rows, kind);
        const ask = async (share: number, field: number) => {
          const { prompt, answer } = table.question(Math.floor(share * rows), table.fields[field]!);
          const { text, promptTokens, tokensByTier } = await complete(url, { prompt, max_tokens: 4, temperature: 0 });
          return { right: text === ` ${answer}`, promptTokens, tokensByTier };
        };
        const shared = Math.floor((promptTokens - 7) / blockTokens) * blockTokens; // all to "... is the"
        expect(await ask(0.9, 0), kind).toEqual({ right: true, promptTokens, tokensByTier: {} });
        expect(await ask(0.2, 1), kind).toEqual({ right: true, promptTokens, tokensByTier: { engine: shared } });
        await resetPrefixCache(url);
        const { tokensByTier, ...answered } = await ask(0.6, 2);
        expect(answered, kind).toEqual({ right: true, promptTokens });
        expect(tokensByTier, kind).toEqual({ arena: shared });
      }
    }
  } finally {
    await machine.close();
  }
});
