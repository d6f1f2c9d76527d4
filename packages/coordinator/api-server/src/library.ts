/**
 * The face of `@huggingface/tokenizers` 0.2 that we use. Its own declarations import without file endings, which
 * TypeScript does not resolve for an ES module, so the names arrive untyped; this file types them once.
 */
import * as untyped from '@huggingface/tokenizers';

/** A stage before the model: text in, pre-tokens out. Sequences keep their stages in `tokenizers`. */
export interface PreTokenizer {
  readonly tokenizers?: PreTokenizer[];
  pre_tokenize(text: readonly string[]): string[];
}

/** BPE and the like: pre-tokens in, tokens out. */
export interface TokenizerModel {
  /** Token of each id; holes where an id has none. */
  readonly vocab: readonly (string | undefined)[];
  readonly fuse_unk: boolean;
  encode(pieces: readonly string[]): string[];
}

export interface LibraryTokenizer {
  readonly pre_tokenizer: PreTokenizer | null;
  readonly model: TokenizerModel;
  encode(text: string, options: { readonly add_special_tokens: boolean }): { readonly ids: number[] };
  decode(
    ids: readonly number[],
    options: { readonly skip_special_tokens: boolean; readonly clean_up_tokenization_spaces: boolean },
  ): string;
}

export const LibraryTokenizer = (untyped as unknown as { Tokenizer: unknown }).Tokenizer as new (
  tokenizer: object,
  config: object,
) => LibraryTokenizer;
