/**
 * A small body whose prompt is token ids, read where it arrived: there is no text in it, and the way to a thread and back costs more than
 * reading it. Whatever is not as it should be goes to a thread all the same, which says why.
 */
import type { TextModel } from './text-model.ts';
import { type BodyKind, type UnderstoodPrompts, understandIds } from './understand.ts';

/** Some 12,000 tokens: read within half a millisecond, of which the event loop would have spent most on a thread's message and answer. */
const mostBytes = 64 << 10;
/** A parser's work: read within a tenth of a millisecond. */
const mostBeside = 4 << 10;

/** undefined: not one of these. */
export function idsAtOnce(
  kind: BodyKind,
  models: readonly TextModel[],
  body: ArrayBuffer,
): UnderstoodPrompts | undefined {
  if (kind !== 'completion' || body.byteLength > mostBytes) return undefined;
  return understandIds(new Uint8Array(body), models, mostBeside);
}
