/** The demo's own claims, as `npm run demo -- --json` states them. */
import { expect, it } from 'vitest';
import { kvtier } from './kvtier-up.ts';

interface DemoRequest {
  readonly name: string;
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly tier: string;
  readonly ttftMs: number;
  readonly text: string;
  readonly right: boolean;
}

// The longest table, of a kind that is not the default; the model's answers about all of them: demo-model.long.test.ts.
it('answers right and identically, cold, warm and after SIGKILL', async () => {
  const promptTokens = 3999;
  const { code, stdout, stderr } = await kvtier('demo', '--json', '--rows', '332', '--table', 'ships');
  expect({ code, stderr }).toMatchObject({ code: 0 });
  const { identical, requests } = JSON.parse(stdout.trimEnd().split('\n').at(-1)!) as {
    identical: boolean;
    requests: DemoRequest[];
  };
  expect(identical).toBe(true);
  expect(requests.map(({ name, tier, right }) => ({ name, tier, right }))).toEqual([
    { name: 'cold', tier: '', right: true },
    { name: 'warm', tier: 'arena', right: true },
    { name: 'restart', tier: 'disk', right: true },
  ]);
  const [cold, warm, restart] = requests as [DemoRequest, DemoRequest, DemoRequest];
  expect(cold).toMatchObject({ cachedTokens: 0, promptTokens });
  for (const { cachedTokens, promptTokens } of [warm, restart]) {
    expect(cachedTokens).toBeGreaterThanOrEqual(0.95 * (promptTokens - 15)); // the question is 15 tokens
  }
});
