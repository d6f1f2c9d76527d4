/** Orders with long prompts: the bytes are what the generated code reads and writes. */
import fc from 'fast-check';
import { expect, it } from 'vitest';
import { decodeOrder, encodeOrder } from './generate-order.ts';
import { GenerateOrder, GenerateRequest } from './generated/kvtier/v1/engine.ts';

const generated = (order: GenerateOrder): Buffer => Buffer.from(GenerateOrder.encode(order).finish());
/** With its prompt as a list of numbers. */
function plain(order: GenerateOrder): GenerateOrder {
  const { begin } = order;
  return { ...order, begin: begin && { ...begin, promptTokenIds: Array.from(begin.promptTokenIds) } };
}

const ids = fc.uint32Array({ maxLength: 300 }).chain((all) =>
  fc.constantFrom(
    all,
    all.map((id) => id % 130_000),
  ),
);
const orders: fc.Arbitrary<GenerateOrder> = fc.record({
  number: fc.nat(2 ** 31),
  begin: fc.option(
    fc
      .record({
        ids,
        text: fc.string(),
        maxTokens: fc.nat(),
        stop: fc.array(fc.nat(), { maxLength: 3 }),
        isGreedy: fc.boolean(),
      })
      .map(({ ids: promptTokenIds, text, maxTokens, stop, isGreedy }) => ({
        ...GenerateRequest.decode(new Uint8Array(0)),
        ...{ requestId: text, promptTokenIds: promptTokenIds as unknown as number[], maxTokens, cacheSalt: text },
        ...{ temperature: isGreedy ? 0 : 0.5, seed: isGreedy ? undefined : 7n, stopTokenIds: stop },
      })),
    { nil: undefined },
  ),
});

it('are read by the generated code as they were written, and the other way around', () => {
  fc.assert(
    fc.property(orders, (order) => {
      const expected = plain(order);
      expect(GenerateOrder.decode(encodeOrder(order))).toEqual(expected);
      expect(plain(decodeOrder(encodeOrder(order)))).toEqual(expected);
      expect(plain(decodeOrder(generated(order)))).toEqual(expected);
    }),
  );
});

it('are packed and unpacked at once where the prompt is long', () => {
  const promptTokenIds = Uint32Array.from({ length: 10_000 }, (_, i) => (i * 0x9e3779b1) >>> (i % 32));
  const begin = { ...GenerateRequest.decode(new Uint8Array(0)), promptTokenIds: promptTokenIds as unknown as number[] };
  const read = decodeOrder(encodeOrder({ number: 9, begin }));
  expect(read.begin!.promptTokenIds).toEqual(promptTokenIds);
  expect(generated(read)).toEqual(generated({ number: 9, begin }));
});

it('of another form are left to the generated code', () => {
  const promptTokenIds = Array.from({ length: 100 }, (_, i) => i);
  const whole = generated({ number: 1, begin: { ...GenerateRequest.decode(new Uint8Array(0)), promptTokenIds } });
  const field = (tag: number, bytes: readonly number[]): Buffer => Buffer.from([tag, bytes.length, ...bytes]);
  const ids64 = Array.from({ length: 70 }, () => 5);
  for (const bytes of [
    Buffer.concat([whole, field(18, [])]), // a second request, which is merged with the first or takes its place
    field(18, [16, 7, 18, 70, ...ids64]), // one id alone
    field(18, [18, 60, ...ids64.slice(10), 18, 40, ...ids64.slice(30)]), // two lists
    field(18, [18, 70, 0xff, 0xff, 0xff, 0xff, 0x7f, ...ids64.slice(5)]), // beyond 32 bits
    field(18, [18, 80, ...ids64]), // cut off
    Buffer.concat([whole, Buffer.from([18, 120, 1])]),
    Buffer.concat([whole, Buffer.from([12])]),
    Buffer.alloc(100, 0xff),
  ]) {
    let expected: unknown;
    try {
      expected = GenerateOrder.decode(bytes);
    } catch (error) {
      expect(() => decodeOrder(bytes)).toThrow((error as Error).message);
      continue;
    }
    expect(plain(decodeOrder(bytes))).toEqual(expected);
  }
});
