/**
 * Tokens back to text, one at a time. Each token stands for some bytes; a UTF-8 character may be spread over several
 * tokens, so the bytes go through one streaming decoder that holds back an unfinished character.
 *
 * Invariant: the concatenation of what `push` returned is the library's decode of all tokens, except for the U+FFFD of
 * a character that the last token left unfinished, which is never emitted.
 */
import { KvError } from '@kvtier/errors';

/** The parts of tokenizer.json that say how tokens become text. */
export interface DecoderConfig {
  readonly type: string;
  readonly decoders?: readonly DecoderConfig[];
  readonly pattern?: { readonly String?: string };
  readonly content?: string;
  readonly replacement?: string;
}

type TokenToBytes = (token: string) => Uint8Array;
const encoder = new TextEncoder();
const whole = new TextDecoder('utf-8', { ignoreBOM: true, fatal: true });
const noBytes = new Uint8Array(0);

/** GPT-2's printable stand-ins for the 256 bytes: bytes that are printable are themselves, the rest follow at U+0100. */
const byteOfChar: ReadonlyMap<string, number> = (() => {
  const table = new Map<string, number>();
  let next = 256;
  for (let byte = 0; byte < 256; byte++) {
    const printable = (byte >= 0x21 && byte <= 0x7e) || (byte >= 0xa1 && byte <= 0xac) || byte >= 0xae;
    table.set(String.fromCharCode(printable ? byte : next++), byte);
  }
  return table;
})();

const byteLevel: TokenToBytes = (token) => Uint8Array.from(token, (char) => byteOfChar.get(char) ?? 0);

/** SentencePiece: `replacement` stands for a space, <0xNN> for a byte. */
const sentencePiece =
  (replacement: string): TokenToBytes =>
  (token) => {
    const byte = /^<0x([0-9A-Fa-f]{2})>$/.exec(token);
    return byte ? Uint8Array.of(Number.parseInt(byte[1]!, 16)) : encoder.encode(token.replaceAll(replacement, ' '));
  };

/** @throws KvError MODEL for a decoder that is neither byte-level nor SentencePiece. */
export function tokenToBytes(decoder: DecoderConfig | null, source: string): TokenToBytes {
  const parts = decoder?.type === 'Sequence' ? (decoder.decoders ?? []) : decoder ? [decoder] : [];
  if (parts.some((part) => part.type === 'ByteLevel')) return byteLevel;
  const space = parts.find((part) => part.type === 'Replace' && part.content === ' ')?.pattern?.String;
  if (parts.some((part) => part.type === 'ByteFallback')) return sentencePiece(space ?? '▁');
  const metaspace = parts.find((part) => part.type === 'Metaspace');
  if (metaspace) return sentencePiece(metaspace.replacement ?? '▁');
  throw new KvError(
    'MODEL',
    `${source}: decoder "${decoder?.type ?? 'none'}" is not served; use a model with a ByteLevel, ByteFallback or Metaspace decoder`,
  );
}

/** A token table as it moves between threads. */
export interface TokenTableParts {
  /** Of all tokens, one after another. */
  readonly bytes: Uint8Array<ArrayBuffer>;
  /** Where each token's bytes end. */
  readonly ends: Uint32Array<ArrayBuffer>;
  /** Tokens that end a run of bytes: added to the vocabulary, not special, text as they stand. */
  readonly literal: readonly number[];
}

/** What every token of a vocabulary stands for. */
export class TokenTable {
  readonly parts: TokenTableParts;
  readonly #literal: ReadonlySet<number>;
  /** By token, from its first use on; null: its bytes are no text by themselves. */
  readonly #texts: (string | null | undefined)[];

  constructor(parts: TokenTableParts) {
    this.parts = parts;
    this.#literal = new Set(parts.literal);
    this.#texts = new Array(parts.ends.length);
  }

  static of(
    vocabulary: readonly (string | undefined)[],
    toBytes: TokenToBytes,
    special: ReadonlySet<number>,
    added: ReadonlySet<number>,
  ): TokenTable {
    const literal = new Set([...added].filter((id) => !special.has(id)));
    const each = Array.from(vocabulary, (token, id) => {
      if (token === undefined || special.has(id)) return noBytes;
      return literal.has(id) ? encoder.encode(token) : toBytes(token);
    });
    const ends = new Uint32Array(each.length);
    const bytes = new Uint8Array(each.reduce((sum, { length }) => sum + length, 0));
    let end = 0;
    for (const [id, part] of each.entries()) {
      bytes.set(part, end);
      ends[id] = end += part.length;
    }
    return new TokenTable({ bytes, ends, literal: [...literal] });
  }

  /** Empty for a special token and for an id beyond the vocabulary (padding of the embedding). */
  bytes(id: number): Uint8Array {
    const { bytes, ends } = this.parts;
    const end = ends[id];
    return end === undefined ? noBytes : bytes.subarray(ends[id - 1] ?? 0, end);
  }

  /** Of a token that begins and ends with whole characters; null of any other, and of a literal one. */
  text(id: number): string | null {
    const known = this.#texts[id];
    if (known !== undefined) return known;
    if (id >= this.#texts.length) return '';
    const text = this.#literal.has(id) ? null : textOf(this.bytes(id));
    this.#texts[id] = text;
    return text;
  }

  isLiteral(id: number): boolean {
    return this.#literal.has(id);
  }
}

function textOf(bytes: Uint8Array): string | null {
  try {
    return whole.decode(bytes);
  } catch {
    return null;
  }
}

/** One answer's text as it grows. */
export class Detokenizer {
  readonly #table: TokenTable;
  #decoder = new TextDecoder('utf-8', { ignoreBOM: true });
  /** The decoder may hold a part of a character. */
  #isWithin = false;

  constructor(table: TokenTable) {
    this.#table = table;
  }

  /** The text that this token completes; '' while a character is unfinished or for a special token. */
  push(id: number): string {
    // Nearly all tokens: nothing is decoded anew.
    const text = this.#table.text(id);
    if (text !== null && !this.#isWithin) return text;
    // After whole characters nothing is held; those of no bytes change nothing.
    if (text !== '') this.#isWithin = text === null;
    if (!this.#table.isLiteral(id)) return this.#decoder.decode(this.#table.bytes(id), { stream: true });
    const before = this.#decoder.decode(); // a literal token ends the bytes before it
    this.#decoder = new TextDecoder('utf-8', { ignoreBOM: true });
    return before + this.#decoder.decode(this.#table.bytes(id), { stream: true });
  }
}
