/**
 * A body whose prompt is a list of token ids, parsed with the list read straight from its bytes: a JSON parser makes an array of 10,000
 * numbers of it, which is then looked through and copied number by number, and takes several times as long as all else in the body.
 *
 *     {"prompt": [5, 6, 7], "n": 1}     ──▶     ids 5 6 7, and to be parsed:     {"prompt": [0.1836…], "n": 1}
 *
 * Invariant: what comes out is what JSON.parse makes of the whole body, or undefined. Where the list was found need not be right: its
 * stand-in is a number that no client knows, and the list is taken only where the parser has found that as the prompt.
 */
import { native } from '@kvtier/data-plane';

/** Token ids in memory of their own. */
export type ReadIds = Uint32Array<ArrayBuffer>;

export interface BodyWithIds {
  /** The body, with one number as its prompt. What it says of depth and of the count of lists is said of the body. */
  readonly shortened: Uint8Array;
  /** What was parsed of `shortened`, with the list of ids in it; undefined: that was not its prompt. */
  complete(parsed: unknown): unknown;
}

const nameOf = Buffer.from('"prompt"');
const [tab, newLine, carriageReturn, space] = [0x09, 0x0a, 0x0d, 0x20];
const [colon, openList] = [0x3a, 0x5b];

/** undefined: no list of token ids is found, or one that only a parser can say what is wrong with. */
export function bodyWithIds(text: Uint8Array): BodyWithIds | undefined {
  const bytes = Buffer.from(text.buffer, text.byteOffset, text.length);
  const name = bytes.indexOf(nameOf);
  if (name === -1) return undefined;
  let start = skipSpace(text, name + nameOf.length);
  if (text[start] !== colon) return undefined;
  start = skipSpace(text, start + 1);
  if (text[start] !== openList) return undefined;
  const list = native.readIds(text, start + 1);
  if (list === null) return undefined;
  const { ids, end } = list;
  const standIn = Math.random();
  const shortened = Buffer.concat([bytes.subarray(0, start), Buffer.from(`[${standIn}]`), bytes.subarray(end)]);
  return {
    shortened,
    complete: (parsed) => {
      const prompt = (parsed as { prompt?: unknown } | null)?.prompt;
      if (!Array.isArray(prompt) || prompt.length !== 1 || prompt[0] !== standIn) return undefined;
      return { ...(parsed as object), prompt: ids };
    },
  };
}

/** JSON knows these four. */
function skipSpace(text: Uint8Array, from: number): number {
  let at = from;
  for (let byte = text[at]; byte === space || byte === newLine || byte === carriageReturn || byte === tab; ) {
    byte = text[++at];
  }
  return at;
}
