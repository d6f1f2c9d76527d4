/**
 * A model's text side, loaded from its Hugging Face folder: tokenizer.json, tokenizer_config.json,
 * special_tokens_map.json and the chat template (in tokenizer_config.json or chat_template.jinja).
 *
 * Whatever is missing or damaged is one KvError MODEL that names the file.
 */
import { KvError } from '@kvtier/errors';
import { type ChatMessage, ChatTemplate } from './chat-template.ts';
import { type DecoderConfig, Detokenizer, TokenTable, type TokenTableParts, tokenToBytes } from './detokenizer.ts';
import { boundedEncoder, type PreTokenizerConfig } from './fast-encode.ts';
import { LibraryTokenizer } from './library.ts';
import { TextFolder } from './text-folder.ts';

interface AddedToken {
  readonly id: number;
  readonly content: string;
  readonly special?: boolean;
}

interface TokenizerFile {
  readonly model: { readonly type?: string };
  readonly decoder: DecoderConfig | null;
  readonly pre_tokenizer: PreTokenizerConfig | null;
  readonly normalizer: unknown;
  readonly added_tokens: readonly AddedToken[];
}

type Encode = ReturnType<typeof boundedEncoder>;

/**
 * Of heap, that a tokenizer takes for a byte of its tokenizer.json, and whatever that holds: measured 9 (128,000 tokens) to 14 (4,000), and
 * what is remembered of pre-tokens (fast-encode.ts).
 */
const [bytesPerFileByte, bytesBeside] = [14, 8 << 20];
/** Normalization (NFC) may make a text shorter, by less than this. */
const normalizerShrink = 4;

export class Tokenizer {
  readonly #encode: Encode;
  readonly #table: TokenTable;
  readonly #chat: ChatTemplate | undefined;
  /** No token covers more characters of a prompt than this. */
  readonly #maxTokenChars: number;
  /** Of heap, about. */
  readonly heldBytes: number;

  constructor(
    encode: Encode,
    table: TokenTable,
    chat: ChatTemplate | undefined,
    maxTokenChars: number,
    heldBytes: number,
  ) {
    this.heldBytes = heldBytes;
    this.#encode = encode;
    this.#table = table;
    this.#chat = chat;
    this.#maxTokenChars = maxTokenChars;
  }

  /**
   * Token ids of `text`. `addSpecialTokens`: as the model's post-processor does (a leading <s>, for example).
   * @throws KvError TOO_LONG early, when there will be more than `maxTokens`
   */
  encode(text: string, options: { readonly addSpecialTokens: boolean; readonly maxTokens?: number }): number[] {
    return this.#encode(text, options.addSpecialTokens, options.maxTokens ?? Number.POSITIVE_INFINITY);
  }

  /** At least so many tokens, known without encoding: refuses a hopeless prompt before seconds are spent on it. */
  leastTokens(text: string): number {
    return Math.ceil(text.length / this.#maxTokenChars);
  }

  /** Text of `ids` without special tokens; an unfinished last character is left out. */
  decode(ids: readonly number[]): string {
    const detokenizer = this.detokenizer();
    return ids.map((id) => detokenizer.push(id)).join('');
  }

  detokenizer(): Detokenizer {
    return new Detokenizer(this.#table);
  }

  /** A copy of what a Detokenizer needs, to go to another thread. */
  tableParts(): TokenTableParts {
    return structuredClone(this.#table.parts);
  }

  /** As `ChatTemplate.readsParts`. */
  get readsParts(): boolean {
    return this.#chat?.readsParts === true;
  }

  /** Why no chat is to be expected of its template, which is there; undefined: it takes a conversation as usual as can be. */
  get chatProblem(): string | undefined {
    return this.#chat?.problem;
  }

  /** The prompt of a conversation, as text. @throws KvError REQUEST without a template or when it refuses them */
  chatPrompt(messages: readonly ChatMessage[]): string {
    if (!this.#chat) {
      throw new KvError('REQUEST', 'messages: this model has no chat template; use /v1/completions with a prompt');
    }
    return this.#chat.render(messages);
  }
}

/**
 * Reads the folder; for a vocabulary of 128,000 tokens this takes about a second. `digest`: of the files that a worker of the model has
 * (`textDigestOf`); each is read once, so that what is compared is what is used. @throws KvError MODEL
 */
export function loadTokenizer(modelDir: string, digest?: string): Tokenizer {
  const files = new TextFolder(modelDir);
  const path = files.pathOf('tokenizer.json');
  if (digest !== undefined) files.compare(digest);
  const file = files.json('tokenizer.json', true) as unknown as TokenizerFile;
  const config = files.json('tokenizer_config.json');
  const specialTokens = namedTokens({ ...files.json('special_tokens_map.json'), ...config });
  const damaged = (what: string): KvError =>
    new KvError('MODEL', `${path}: ${what}; copy the file again from where the model came from`);
  if (!Array.isArray(file.added_tokens) || typeof file.model !== 'object' || file.model === null) {
    throw damaged('not a tokenizer (no "model" or no "added_tokens")');
  }
  const toBytes = tokenToBytes(file.decoder, path);
  let library: LibraryTokenizer;
  let encode: Encode;
  try {
    library = new LibraryTokenizer(file, config);
    encode = boundedEncoder(library, file.pre_tokenizer);
    // A vocabulary that lost its letters fails here and not at the first request.
    const probe = encode('probe', false, Number.POSITIVE_INFINITY);
    if (probe.length === 0 || !probe.every(Number.isInteger)) throw new Error('the vocabulary cannot spell a word');
  } catch (error) {
    throw damaged(`cannot be used (${String((error as Error).message).split('\n', 1)[0]})`);
  }
  const vocabulary = library.model.vocab;
  const special = new Set(file.added_tokens.filter((token) => token.special).map((token) => token.id));
  const added = new Set(file.added_tokens.map((token) => token.id));
  // A token of k characters covers k bytes or k characters, so at most k characters of the normalized text.
  const longest = vocabulary.reduce((most, token) => Math.max(most, token?.length ?? 0), 1);
  const maxTokenChars = file.normalizer === null ? longest : longest * normalizerShrink;
  const table = TokenTable.of(vocabulary, toBytes, special, added);
  const heldBytes = bytesBeside + bytesPerFileByte * files.bytesOf('tokenizer.json');
  return new Tokenizer(encode, table, loadChatTemplate(files, config, specialTokens), maxTokenChars, heldBytes);
}

function loadChatTemplate(
  files: TextFolder,
  config: Readonly<Record<string, unknown>>,
  specialTokens: Readonly<Record<string, string>>,
): ChatTemplate | undefined {
  const own = files.text('chat_template.jinja');
  if (own !== undefined) return new ChatTemplate(own, specialTokens, files.pathOf('chat_template.jinja'));
  const source = files.pathOf('tokenizer_config.json');
  const given = config.chat_template;
  if (given === undefined || given === null) return undefined;
  // One template, or several with names; "default" is the one for plain conversation.
  const text = Array.isArray(given)
    ? given.find((entry: { name?: unknown; template?: unknown }) => entry?.name === 'default')?.template
    : given;
  if (typeof text !== 'string') {
    throw new KvError('MODEL', `${source}: chat_template is neither a text nor a list with a "default"; correct it`);
  }
  return new ChatTemplate(text, specialTokens, source);
}

/** bos_token and the like, written either as text or as {content}. */
function namedTokens(config: Readonly<Record<string, unknown>>): Record<string, string> {
  const tokens: Record<string, string> = {};
  for (const [name, value] of Object.entries(config)) {
    if (!name.endsWith('_token')) continue;
    const content = typeof value === 'string' ? value : (value as { content?: unknown } | null)?.content;
    if (typeof content === 'string') tokens[name] = content;
  }
  return tokens;
}
