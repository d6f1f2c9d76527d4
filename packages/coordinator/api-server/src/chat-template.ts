/** A model's chat template: messages in, the prompt's text out. The template is the model's own (Jinja, from its folder). */
import { Template } from '@huggingface/jinja';
import { KvError } from '@kvtier/errors';
import './text-methods.ts';

export interface ChatMessage {
  readonly role: 'system' | 'user' | 'assistant';
  readonly content: string;
  /** Who speaks, for templates that say it. */
  readonly name?: string;
}

/** A loop over what a message holds. */
const loopOverParts = /\{%[-+]?\s*for\s[^%]*?\sin\s[^%]*?\bcontent\b/;

export class ChatTemplate {
  /** It looks at the parts of a message one by one: engines hand it the list, where others get one text. */
  readonly readsParts: boolean;
  readonly #template: Template;
  readonly #source: string;
  readonly #specialTokens: Readonly<Record<string, string>>;

  /** @throws KvError MODEL when the template does not parse */
  constructor(text: string, specialTokens: Readonly<Record<string, string>>, source: string) {
    this.readsParts = loopOverParts.test(text);
    try {
      this.#template = new Template(text);
    } catch (error) {
      throw new KvError('MODEL', `${source}: the chat template does not parse (${oneLine(error)}); correct it`);
    }
    this.#specialTokens = specialTokens;
    this.#source = source;
  }

  /** Why it renders not even one question: it asks of the library what that cannot do, for example. undefined: it does. */
  get problem(): string | undefined {
    try {
      this.render([{ role: 'user', content: 'Hello' }]);
      return undefined;
    } catch (error) {
      return `${this.#source}: chats will be refused (${oneLine(error)}); correct the chat template, or use completions`;
    }
  }

  /** @throws KvError REQUEST when the template refuses these messages (for example two users in a row) */
  render(messages: readonly ChatMessage[]): string {
    try {
      return this.#template.render({
        ...this.#specialTokens,
        messages,
        add_generation_prompt: true,
        tools: null,
        documents: null,
      });
    } catch (error) {
      throw new KvError('REQUEST', `messages: the model's chat template refuses them (${oneLine(error)})`);
    }
  }
}

const oneLine = (error: unknown): string => String((error as Error).message).split('\n', 1)[0]!;
