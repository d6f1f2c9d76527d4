/** A body whose list of token ids is read from its bytes says what a parser makes of it, or is left to the parser. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { bodyWithIds } from './json-ids.ts';

/** undefined: left to the parser. */
function read(text: string): unknown {
  const withIds = bodyWithIds(new TextEncoder().encode(text));
  if (withIds === undefined) return undefined;
  const parsed = withIds.complete(JSON.parse(Buffer.from(withIds.shortened).toString())) as { prompt: Uint32Array };
  return parsed && { ...parsed, prompt: [...parsed.prompt] };
}

it('the list is read, wherever the prompt stands and however it is spaced', () => {
  for (const text of [
    '{"prompt":[5]}',
    '{"prompt":[0,4294967295,10]}',
    '{ "n" : 1 , "prompt" \n:\t[ 5 ,\r\n6\t] , "stop": "a" }',
    '{"stop":"\\"prompt\\": [1]","prompt":[5,6]}',
    '{"prompt":"a","prompt":[5,6]}',
    '\u{feff}{"prompt":[7]}'.slice(1),
  ]) {
    const whole = JSON.parse(text) as unknown;
    expect([text, read(text) ?? whole]).toEqual([text, whole]);
  }
  expect(read('{"n":1,"prompt":[ 5 ,6 ]}')).toEqual({ n: 1, prompt: [5, 6] });
});

it('what is no list of ids, or not the prompt, is left to the parser', () => {
  for (const list of ['', ' ', '5,', ',5', '5 6', '05', '-5', '5.0', '5e1', '4294967296', '"5"', '[5]', 'null'])
    expect([list, bodyWithIds(new TextEncoder().encode(`{"prompt":[${list}`))]).toEqual([list, undefined]);
  for (const text of ['{"prompt":"5"}', '{"prompt":[5,[6]]}', '{"messages":[5]}', '{"prompt"', '{"prompt":', ''])
    expect([text, bodyWithIds(new TextEncoder().encode(text))]).toEqual([text, undefined]);
  for (const text of [
    '{"x":{"prompt":[5]},"prompt":[6]}',
    '{"prompt":[5],"prompt":"a"}',
    '[{"prompt":[5]}]',
    '{"x":{"prompt":[5]}}',
  ])
    expect([text, read(text)]).toEqual([text, undefined]);
});

it('whatever the body says beside its list, it is what the parser makes of all of it', () => {
  const spaces = fc.constantFrom('', '', ' ', '\n', '\t \r\n');
  const names = fc.constantFrom('prompt', 'prompt', 'prompt', 'n', 'stop', '"prompt":[1]', 'x');
  const { value } = fc.letrec((tie) => ({
    value: fc.oneof(
      { maxDepth: 3 },
      { weight: 4, arbitrary: fc.array(fc.nat(2 ** 32), { maxLength: 8 }) },
      fc.double({ noNaN: true }),
      fc.string().map((text) => text.replaceAll(',', '')),
      fc.array(tie('value'), { maxLength: 3 }),
      fc.dictionary(names, tie('value'), { maxKeys: 3, noNullPrototype: true }),
    ),
  }));
  const body = fc.array(fc.tuple(names, value, spaces, spaces), { maxLength: 5 });
  let readHere = 0;
  fc.assert(
    fc.property(body, (members) => {
      const parts = members.map(([name, each, a, b]) => {
        const json = JSON.stringify(each).replaceAll(',', `${a},${b}`);
        return `${a}${JSON.stringify(name)}${b}:${a}${json}${b}`;
      });
      const text = `{${parts.join(',')}}`;
      const whole = JSON.parse(text) as { prompt?: unknown };
      const seen = read(text);
      if (seen === undefined) return;
      readHere++;
      expect(seen).toEqual(whole);
    }),
    { numRuns: 500 },
  );
  expect(readHere).toBeGreaterThan(20);
});
