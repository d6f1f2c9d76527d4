/** The decode side of a hand-off that is told the answer's first token by who computed the prompt. */
import { describe, expect, it } from 'vitest';
import { idle, pair, patience } from './testing/pair.ts';
import { naiveAnswer, prompt, type SchedulerRig } from './testing/rig.ts';

describe('told the first token', () => {
  const answer = (tokens: number) => naiveAnswer(prompt(1, tokens), 5);
  const asks = (d: SchedulerRig, tokens: number, part = {}) =>
    d.submit('a', prompt(1, tokens), { maxTokens: 5, handOff: { blocks: 10, ...patience }, ...part });

  it.each([41, 43, 44])('behind %i tokens: goes on behind it, and draws the second one at once', async (tokens) => {
    const { world, p, d } = pair();
    asks(d, tokens);
    expect(d.engine.tellFirstToken('a', answer(tokens)[0]!)).toBe(true);
    // Once is enough.
    expect(d.engine.tellFirstToken('a', answer(tokens)[0]!)).toBe(false);
    p.submit('a', prompt(1, tokens), { prefillOnly: { blocks: 10 } });
    await world.until(() => p.ended('a') && d.ended('a'));
    const drawn = d.outputs
      .get('a')!
      .map(({ tokenIds }) => tokenIds)
      .filter(({ length }) => length > 0);
    expect(drawn.map(({ length }) => length)).toEqual([2, 1, 1, 1]);
    expect(d.tokens('a')).toEqual(answer(tokens));
    const steps = d.executor.steps.map(({ queryTokens }) => queryTokens[0]);
    expect(steps).toEqual([tokens - 40 + 1, 1, 1, 1]);
    const cache = d.outputs.get('a')!.flatMap((output) => output.cache ?? []);
    expect(cache).toMatchObject([{ promptTokens: tokens, cachedTokens: 40, handedTokens: 40 }]);
    for (const rig of [p, d]) await rig.drain();
    for (const rig of [p, d]) idle(rig);
  });

  it('goes before the chunks of prompts that run, and has its answer whole where blocks fall short', async () => {
    const { world, d } = pair();
    asks(d, 44);
    await world.until(() => d.connector.awaiting.size === 1);
    expect(d.engine.tellFirstToken('a', answer(44)[0]!)).toBe(true);
    expect(d.engine.changeHandOff('a', 0)).toBe(true);
    await world.until(() => d.ended('a'));
    expect(d.tokens('a')).toEqual(answer(44));
    expect(d.engine.stats().handOffEnds).toEqual({ changed: 1 });
    await d.drain();
    idle(d);
  });

  it('goes on from what it was told, as an answer does that is moved', async () => {
    const { world, p, d } = pair();
    asks(d, 43);
    const told = (answer(43)[0]! + 1) % 50;
    d.engine.tellFirstToken('a', told);
    p.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    await world.until(() => p.ended('a') && d.ended('a'));
    expect(d.tokens('a')).toEqual([told, ...naiveAnswer([...prompt(1, 43), told], 4)]);
  });

  it('draws it itself where it has it already, or would end with it; no other token is taken', async () => {
    const { world, p, d } = pair();
    const [first] = answer(43);
    expect(d.engine.tellFirstToken('a', first!)).toBe(false);
    asks(d, 43, { maxTokens: 1 });
    d.submit('b', prompt(1, 43), { stopTokenIds: [first!], handOff: { blocks: 10, ...patience } });
    d.submit('c', prompt(1, 43));
    for (const id of ['a', 'b', 'c']) expect([id, d.engine.tellFirstToken(id, first!)]).toEqual([id, false]);
    for (const wrong of [-1, 1.5, 1_000_000])
      expect(() => d.engine.tellFirstToken('a', wrong)).toThrow(
        expect.objectContaining({
          code: 'REQUEST',
          message: expect.stringContaining(`first token ${wrong} is not in`),
        }),
      );
    p.submit('a', prompt(1, 43), { prefillOnly: { blocks: 10 } });
    await world.until(() => ['a', 'b', 'c'].every((id) => d.ended(id)));
    expect(d.engine.tellFirstToken('a', first!)).toBe(false);
    expect([d.tokens('a'), d.tokens('b')]).toEqual([[first], [first]]);
  });
});
