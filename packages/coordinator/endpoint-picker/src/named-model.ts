/**
 * The model that a body names, of one that nobody read as a prompt: too large, cut off, or for a tokenizer that is not there.
 *
 *     {"messages": […], "stream": true, "model": "m"  …whatever follows, or nothing
 *      depth 1 name      depth 1 name   ^ its value ^
 *
 * One pass over the bytes, which need not be all; the first value under that name counts. Turns of the event loop are short.
 */
import { setImmediate as nextTurn } from 'node:timers/promises';

const [quote, backslash, comma, colon] = [0x22, 0x5c, 0x2c, 0x3a];
const [openList, closeList, openObject, closeObject] = [0x5b, 0x5d, 0x7b, 0x7d];
/** A third of a millisecond. */
const turnBytes = 256 << 10;
/** Of a name's JSON; no model has a longer one. */
const mostNameBytes = 1_024;

/** undefined: none, as far as the bytes go. @throws the reason of `signal` */
export async function modelIn(pieces: readonly Buffer[], signal: AbortSignal): Promise<string | undefined> {
  const scan = new Scan();
  let left = turnBytes;
  for (const piece of pieces) {
    for (let from = 0; from < piece.length; from += turnBytes) {
      const part = piece.subarray(from, from + turnBytes);
      if (scan.push(part)) return scan.model;
      left -= part.length;
      if (left > 0) continue;
      await nextTurn(undefined);
      if (signal.aborted) throw signal.reason;
      left = turnBytes;
    }
  }
  return undefined;
}

class Scan {
  model: string | undefined;
  #depth = 0;
  /** Of the text that is being read: its bytes, where it is a name or the value that is looked for. */
  #text: number[] | undefined;
  #inText = false;
  #isEscaped = false;
  /** Behind a colon of the outermost object. */
  #inValue = false;
  #isModel = false;

  /** Whether that was enough. */
  push(bytes: Buffer): boolean {
    for (let at = 0; at < bytes.length; at++) {
      const byte = bytes[at]!;
      if (this.#inText ? this.#inside(byte) : this.#outside(byte)) return true;
    }
    return false;
  }

  #inside(byte: number): boolean {
    if (this.#isEscaped) this.#isEscaped = false;
    else if (byte === quote) return this.#ended();
    else if (byte === backslash) this.#isEscaped = true;
    if (this.#text !== undefined && this.#text.push(byte) > mostNameBytes) this.#text = undefined;
    return false;
  }

  #ended(): boolean {
    this.#inText = false;
    if (this.#depth !== 1) return false;
    const text = this.#text && textOf(this.#text);
    if (!this.#inValue) this.#isModel = text === 'model';
    else if (this.#isModel) this.model = text;
    return this.#inValue && this.#isModel;
  }

  #outside(byte: number): boolean {
    if (byte <= 0x20) return false;
    if (this.#depth === 0) {
      if (byte === openObject) this.#depth = 1;
      return byte !== openObject && !isMark(byte);
    }
    if (byte === quote) {
      this.#inText = true;
      this.#text = this.#depth === 1 && (!this.#inValue || this.#isModel) ? [] : undefined;
      return false;
    }
    // A model that is no text is none.
    if (this.#depth === 1 && this.#inValue && this.#isModel) return true;
    if (byte === openList || byte === openObject) this.#depth++;
    else if (byte === closeList || byte === closeObject) this.#depth--;
    else if (this.#depth === 1 && byte === colon) this.#inValue = true;
    else if (this.#depth === 1 && byte === comma) this.#inValue = false;
    return this.#depth === 0;
  }
}

/** Of a byte order mark. */
const isMark = (byte: number): boolean => byte === 0xef || byte === 0xbb || byte === 0xbf;

function textOf(bytes: readonly number[]): string | undefined {
  try {
    return JSON.parse(`"${Buffer.from(bytes).toString('utf8')}"`) as string;
  } catch {
    return undefined;
  }
}
