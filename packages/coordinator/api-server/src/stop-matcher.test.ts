/** Stop strings in text cut anywhere, against a naive search. */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import { StopMatcher } from './stop-matcher.ts';

/** The text one character at a time: the first moment at which the text ends with a stop string. */
function oracle(text: string, stops: readonly string[]): { text: string; stopped: boolean } {
  for (let end = 1; end <= text.length; end++) {
    const ending = stops.filter((stop) => text.slice(0, end).endsWith(stop)).sort((a, b) => b.length - a.length)[0];
    if (ending !== undefined) return { text: text.slice(0, end - ending.length), stopped: true };
  }
  return { text, stopped: false };
}

function run(
  pieces: readonly string[],
  stops: readonly string[],
): { text: string; stopped: boolean; pieces: string[] } {
  const matcher = new StopMatcher(stops);
  const shown: string[] = [];
  for (const piece of pieces) {
    const { text, stopped } = matcher.push(piece);
    shown.push(text);
    if (stopped) return { text: shown.join(''), stopped, pieces: shown };
  }
  shown.push(matcher.flush());
  return { text: shown.join(''), stopped: false, pieces: shown };
}

describe('StopMatcher', () => {
  it('equals the naive search however the text is cut', () => {
    const letters = fc.string({ unit: fc.constantFrom('a', 'b', 'c'), minLength: 1, maxLength: 4 });
    fc.assert(
      fc.property(fc.array(letters, { maxLength: 12 }), fc.array(letters, { maxLength: 4 }), (pieces, stops) => {
        const { text, stopped } = run(pieces, stops);
        expect({ text, stopped }).toEqual(oracle(pieces.join(''), stops));
      }),
      { numRuns: 2_000 },
    );
  });

  it('holds back what may become a stop string, and no more', () => {
    expect(run(['One\n', 'Quest', 'ion: two'], ['\nQuestion:']).pieces).toEqual(['One', '', '']);
    expect(run(['One\n', 'Quick', ''], ['\nQuestion:']).pieces).toEqual(['One', '\nQuick', '', '']);
    expect(run(['a', 'b'], []).pieces).toEqual(['a', 'b', '']);
  });
});
