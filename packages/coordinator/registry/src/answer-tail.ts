/**
 * The end of a pod's answer that passes by: its `usage` (OpenAI's object at the end of a JSON body, or in one of the last events of a
 * stream), whether a stream stands between two events, and whether it says itself that it failed. Only the last bytes are kept. Inside of a
 * text the model wrote, quotes and line breaks are escaped: what is found is the answer's own.
 */
export interface Usage {
  readonly promptTokens: number;
  readonly cachedTokens: number;
  readonly completionTokens: number;
}

const keptBytes = 8_192;
const name = '"usage":';
const maxTokens = 2 ** 31;
const lineBreaks = ['\n\n', '\r\n\r\n', '\r\r'];
/** As vLLM and SGLang end a stream whose engine failed; a [DONE] may follow. */
const failedEvent = /(?:^|[\r\n])data: ?\{"error":/;
const doneEvent = /(?:^|[\r\n])data: ?\[DONE\]\s*$/;

export class AnswerTail {
  #bytes: Buffer | undefined;
  #length = 0;

  push(piece: Buffer): void {
    if (piece.length === 0) return;
    this.#bytes ??= Buffer.allocUnsafeSlow(2 * keptBytes);
    const last = piece.length > keptBytes ? piece.subarray(-keptBytes) : piece;
    if (this.#length + last.length > this.#bytes.length) {
      this.#bytes.copyWithin(0, this.#length - keptBytes, this.#length);
      this.#length = keptBytes;
    }
    this.#length += last.copy(this.#bytes, this.#length);
  }

  /** undefined: the answer has none that can be read. */
  usage(): Usage | undefined {
    const text = this.#text();
    for (let at = text.lastIndexOf(name); at !== -1; at = at === 0 ? -1 : text.lastIndexOf(name, at - 1)) {
      const usage = objectAt(text, at + name.length);
      if (usage !== undefined) return usage;
    }
    return undefined;
  }

  /** Of a stream: another event may follow. */
  isBetweenEvents(): boolean {
    const text = this.#text();
    return text === '' || lineBreaks.some((end) => text.endsWith(end));
  }

  /** Of a stream: its last event, after which a client reads nothing, has come. */
  isDone(): boolean {
    return this.isBetweenEvents() && doneEvent.test(this.#text());
  }

  /** Of a stream: one of its last events says that it failed. */
  saysError(): boolean {
    return failedEvent.test(this.#text());
  }

  #text(): string {
    return this.#bytes?.toString('utf8', 0, this.#length) ?? '';
  }
}

function objectAt(text: string, from: number): Usage | undefined {
  const start = text.indexOf('{', from);
  if (start === -1 || text.slice(from, start).trim() !== '') return undefined;
  let depth = 0;
  for (let at = start; at < text.length; at++) {
    if (text[at] === '{') depth++;
    else if (text[at] === '}' && --depth === 0) return asUsage(text.slice(start, at + 1));
  }
  return undefined;
}

function asUsage(json: string): Usage | undefined {
  try {
    const told = JSON.parse(json) as Record<string, unknown>;
    const promptTokens = count(told.prompt_tokens);
    const completionTokens = count(told.completion_tokens) ?? 0;
    if (promptTokens === undefined) return undefined;
    const details = told.prompt_tokens_details as { readonly cached_tokens?: unknown } | null | undefined;
    return { promptTokens, completionTokens, cachedTokens: count(details?.cached_tokens) ?? 0 };
  } catch {
    return undefined;
  }
}

const count = (value: unknown): number | undefined =>
  Number.isInteger(value) && (value as number) >= 0 && (value as number) < maxTokens ? (value as number) : undefined;
