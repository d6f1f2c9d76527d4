/**
 * What a body may be made of, counted on its bytes before anything is made of them: JSON.parse turns 16 MiB of brackets into
 * gigabytes, and a template takes longer for a message than a model for its token.
 */
import { HttpError } from './errors.ts';

export interface JsonBounds {
  readonly maxDepth: number;
  /** Of one object. */
  readonly maxNames: number;
  /** Objects, lists, names and texts together. Numbers are not counted: a prompt may be a million of them. */
  readonly maxItems: number;
}

/** Nothing in a request that is served lies deeper than a text in a part in a message; labels may. */
const maxDepth = 32;
/** A request has about forty, a label may have some. */
const maxNames = 1_024;
/** Of a message with one text part: two objects, a list, four names, three texts. */
const itemsPerMessage = 10;
/** Parameters and labels. */
const itemsBeside = 4_096;

/** For a model of so many tokens: a message costs one at least, so there are no more of them than tokens. */
export const boundsOf = (maxModelTokens: number): JsonBounds => ({
  maxDepth,
  maxNames,
  maxItems: itemsBeside + itemsPerMessage * maxModelTokens,
});

const [quote, backslash, comma] = [0x22, 0x5c, 0x2c];
const [openList, closeList, openObject, closeObject] = [0x5b, 0x5d, 0x7b, 0x7d];

/**
 * One pass over UTF-8 text; what is no JSON is left to the parser, which builds no more than was counted here.
 * @throws HttpError 400
 */
export function checkJsonBounds(text: Uint8Array, { maxDepth, maxNames, maxItems }: JsonBounds): void {
  /** Names that each open object may still have; of a list, and outside of all, any number. */
  const namesLeft: number[] = [Number.POSITIVE_INFINITY];
  let depth = 0;
  let items = 0;
  for (let at = 0; at < text.length; at++) {
    const byte = text[at]!;
    if (byte === quote) {
      items++;
      for (at++; at < text.length && text[at] !== quote; at++) if (text[at] === backslash) at++;
    } else if (byte === openList || byte === openObject) {
      items++;
      if (++depth > maxDepth) throw tooComplex(`lies more than ${maxDepth} levels deep; send it flatter`);
      namesLeft[depth] = byte === openObject ? maxNames - 1 : Number.POSITIVE_INFINITY;
    } else if (byte === closeList || byte === closeObject) {
      depth = Math.max(0, depth - 1); // more ends than beginnings are no JSON
    } else if (byte === comma && --namesLeft[depth]! < 0) {
      throw tooComplex(`has an object of more than ${maxNames} names; send fewer`);
    }
    if (items > maxItems) {
      throw tooComplex(
        `has more than ${maxItems} objects, lists, names and texts, more than this model can take; send less`,
      );
    }
  }
}

const tooComplex = (how: string): HttpError => new HttpError(400, `The body ${how}.`, { code: 'body_too_complex' });
