/**
 * A pod behind whose server a store lies that other pods share, as far as a coordinator sees one: what a prefill leg computed, a decode leg
 * finds there. Its answers follow from the prompt alone.
 *
 *   kv_transfer_params.do_remote_decode   one token, not streamed; the prompt lies in the store; params of its own go back
 *   Prefer: if-available                  412 where the store does not have the prompt
 *   cache_hit_threshold                   finish reason cache_threshold there
 */
import { Pod, type PodRequest } from './pod.ts';

/** Prompts, as JSON. */
export type PodStore = Set<string>;

interface Asked {
  readonly prompt?: unknown;
  readonly messages?: unknown;
  readonly stream?: boolean;
  readonly max_tokens?: number;
  readonly cache_hit_threshold?: number;
  readonly kv_transfer_params?: Readonly<Record<string, unknown>> | null;
}

export class StorePod extends Pod {
  readonly store: PodStore;
  /** Prompts that it computed: those of decode legs that the store did not have, too. */
  readonly computed: string[] = [];
  /** What its prefill legs answer as `kv_transfer_params`; undefined: the name is left out. */
  params: unknown = undefined;
  /** Before an answer of its own; true: it has answered itself. */
  before: (request: PodRequest, isPrefill: boolean) => boolean | Promise<boolean> = () => false;

  constructor(store: PodStore, model: string) {
    super();
    this.store = store;
    this.model = model;
    this.answer = (request) => void this.#answer(request);
  }

  async #answer(request: PodRequest): Promise<void> {
    const { response, headers } = request;
    const asked = JSON.parse(request.body) as Asked;
    const isPrefill = asked.kv_transfer_params?.do_remote_decode === true;
    if (await this.before(request, isPrefill)) return;
    const prompt = JSON.stringify(asked.prompt ?? asked.messages);
    if (isPrefill) {
      if (asked.stream !== false || asked.max_tokens !== 1) return void response.writeHead(400).end('{}');
      this.store.add(prompt);
      this.computed.push(prompt);
      return this.#whole(request, 'x', 'length', this.params === undefined ? {} : { kv_transfer_params: this.params });
    }
    const isHeld = this.store.has(prompt);
    if (headers.prefer === 'if-available' && !isHeld) return void response.writeHead(412).end('{}');
    if ((asked.cache_hit_threshold ?? 0) > 0 && !isHeld) {
      if (asked.stream) return this.#stream(request, [], 'cache_threshold');
      return this.#whole(request, '', 'cache_threshold');
    }
    if (!isHeld) this.computed.push(prompt);
    this.store.add(prompt);
    const words = wordsOf(prompt);
    if (asked.stream) this.#stream(request, words, 'stop');
    else this.#whole(request, words.join(''), 'stop');
  }

  #whole({ path, response }: PodRequest, text: string, reason: string, more: object = {}): void {
    const isChat = path.includes('/chat/');
    const choice = {
      ...(isChat ? { message: { role: 'assistant', content: text } } : { text }),
      ...{ index: 0, finish_reason: reason },
    };
    response.writeHead(200, { 'content-type': 'application/json' });
    response.end(JSON.stringify({ id: 'a', model: this.model, choices: [choice], ...more }));
  }

  #stream({ path, response }: PodRequest, words: readonly string[], reason: string): void {
    const isChat = path.includes('/chat/');
    const say = (part: object): void =>
      void response.write(`data: ${JSON.stringify({ id: 'a', choices: [part] })}\n\n`);
    response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8' });
    if (isChat) say({ index: 0, delta: { role: 'assistant', content: '' }, finish_reason: null });
    for (const word of words)
      say({ index: 0, ...(isChat ? { delta: { content: word } } : { text: word }), finish_reason: null });
    say({ index: 0, ...(isChat ? { delta: {} } : { text: '' }), finish_reason: reason });
    response.end('data: [DONE]\n\n');
  }
}

/** What a pod answers to this prompt, in pieces. */
export const wordsOf = (prompt: string): string[] => ['to', ` ${prompt.length}`, ` ${prompt.slice(-8, -2)}`];
