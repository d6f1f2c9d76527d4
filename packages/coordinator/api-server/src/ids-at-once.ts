/**
 * A small body whose prompt is token ids, read where it arrived: there is no text in it, and the way to a thread and back costs more than
 * reading it. Whatever is not as it should be goes to a thread all the same, which says why.
 */
import type { TextModel } from './text-model.ts';
import { type BodyKind, type UnderstoodPrompts, understand } from './understand.ts';

/** Read within a tenth of a millisecond. */
const mostBytes = 4_096;
/** One prompt; in a text of the body the same is of no harm. */
const idsAlone = /"prompt"\s*:\s*\[[\d\s,]+\]/;

/** undefined: not one of these. */
export function idsAtOnce(
  kind: BodyKind,
  models: readonly TextModel[],
  body: ArrayBuffer,
): UnderstoodPrompts | undefined {
  if (kind !== 'completion' || body.byteLength > mostBytes) return undefined;
  if (!idsAlone.test(Buffer.from(body).toString('latin1'))) return undefined;
  try {
    const understood = understand('completion', new Uint8Array(body), models, noTexts);
    return 'passedOn' in understood ? undefined : understood;
  } catch {
    return undefined;
  }
}

const noTexts = (): never => {
  throw new Error('a text after all');
};
