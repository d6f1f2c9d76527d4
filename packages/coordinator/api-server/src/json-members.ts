/**
 * The members of a JSON object where they lie in its bytes, so that a body can go on with some of them changed and all others byte by
 * byte as they came: numbers that a parser would round, their order, and what nobody here knows.
 *
 *     {"model": "m", "stream": true}      names  ["model", "stream"]
 *      ^───────────^ ^────────────^       spans  [1, 13, 15, 29]
 */

export interface JsonMembers {
  readonly names: readonly string[];
  /** Of each: its first byte, and the first one after it. */
  readonly spans: Uint32Array<ArrayBuffer>;
}

/** A body with more is none that anybody sends; it goes on as it is. */
const maxMembers = 256;
const [quote, backslash, comma, colon] = [0x22, 0x5c, 0x2c, 0x3a];
const [openList, closeList, openObject, closeObject] = [0x5b, 0x5d, 0x7b, 0x7d];

/** Of text that JSON.parse has taken for an object. undefined: it has more members than anybody sends. */
export function membersOf(text: Uint8Array): JsonMembers | undefined {
  const names: string[] = [];
  const spans: number[] = [];
  const decoder = new TextDecoder();
  let at = text.indexOf(openObject) + 1;
  for (;;) {
    const first = skipSpace(text, at);
    if (text[first] !== quote) break; // the end of an empty object
    if (names.length === maxMembers) return undefined;
    const nameEnd = stringEnd(text, first);
    names.push(JSON.parse(decoder.decode(text.subarray(first, nameEnd))) as string);
    const end = valueEnd(text, text.indexOf(colon, nameEnd) + 1);
    spans.push(first, end);
    if (text[end] !== comma) break;
    at = end + 1;
  }
  return { names, spans: Uint32Array.from(spans) };
}

/** The same object with these members, JSON text each, in place of those of their names; undefined: without it. */
export function withMembers(
  text: Uint8Array,
  { names, spans }: JsonMembers,
  changes: Readonly<Record<string, string | undefined>>,
): Uint8Array {
  const parts: Uint8Array[] = [];
  const add = (part: Uint8Array): void => void parts.push(parts.length === 0 ? openBrace : commaBytes, part);
  for (const [at, name] of names.entries())
    if (!Object.hasOwn(changes, name)) add(text.subarray(spans[2 * at]!, spans[2 * at + 1]!));
  for (const [name, json] of Object.entries(changes))
    if (json !== undefined) add(Buffer.from(`${JSON.stringify(name)}:${json}`));
  if (parts.length === 0) parts.push(openBrace);
  parts.push(closeBrace);
  return Buffer.concat(parts);
}

const [openBrace, commaBytes, closeBrace] = ['{', ',', '}'].map((text) => Buffer.from(text)) as [
  Buffer,
  Buffer,
  Buffer,
];

function skipSpace(text: Uint8Array, from: number): number {
  let at = from;
  while (at < text.length && text[at]! <= 0x20) at++;
  return at;
}

/** One past the quote that ends the string that begins at `first`. */
function stringEnd(text: Uint8Array, first: number): number {
  let at = first + 1;
  while (at < text.length && text[at] !== quote) at += text[at] === backslash ? 2 : 1;
  return at + 1;
}

/** The comma or brace after the value that begins at `first` or after it. */
function valueEnd(text: Uint8Array, first: number): number {
  let depth = 0;
  for (let at = first; at < text.length; at++) {
    const byte = text[at]!;
    if (byte === quote) at = stringEnd(text, at) - 1;
    else if (byte === openList || byte === openObject) depth++;
    else if (depth === 0 && (byte === comma || byte === closeObject)) return at;
    else if (byte === closeList || byte === closeObject) depth--;
  }
  return text.length;
}
