/** What is asked of a stream's pieces while they pass by. */
import { AnswerTail } from '@kvtier/registry';
import { expect, it, vi } from 'vitest';
import { AnswerEnd } from './answer-end.ts';
import type { Forwarded } from './engines.ts';

const answer = { status: 200, headers: { 'content-type': 'text/event-stream' } } as unknown as Forwarded;
const event = 'data: {"choices":[{"delta":{"content":"привет [DONE]"}}]}\n\n';
/** After each piece: whether it is done. */
function after(pieces: readonly string[]): boolean[] {
  const end = new AnswerEnd(answer, () => {});
  return pieces.map((piece) => {
    end.push(Buffer.from(piece));
    return end.isDone();
  });
}

it('only what may be its end is compared with it', () => {
  const isDone = vi.spyOn(AnswerTail.prototype, 'isDone');
  expect(after([...Array<string>(100).fill(event), 'data: [DONE]\n\n'])).toEqual([
    ...Array<boolean>(100).fill(false),
    true,
  ]);
  expect(isDone).toHaveBeenCalledTimes(1);
  isDone.mockRestore();
});

it.each(['data: [DONE]\n\n', 'data:[DONE]\r\n\r\n', 'data: [DONE]\r\r', 'data: [DONE] \n\n'])(
  'its end is seen wherever it is cut: %j',
  (done) => {
    for (let at = 1; at < done.length; at++)
      expect(after([event, done.slice(0, at), done.slice(at)]).at(-1)).toBe(true);
    expect(after([event + done])).toEqual([true]);
    expect(after([...event, ...done]).at(-1)).toBe(true);
  },
);
