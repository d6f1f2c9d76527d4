/**
 * From a body to what it asks for and the model that it is for, while models and their tokenizers come, go and are replaced.
 *
 * Invariants: the model is the one whose files made the tokens, whatever is served by now. While what may serve a request is expected in a
 * moment (expected.ts), that is waited for, and the body is kept: the workers that come may read other tokens, and it is read again then.
 */
import { KvError } from '@kvtier/errors';
import type { Body } from './bodies.ts';
import { HttpError } from './errors.ts';
import type { Expected } from './expected.ts';
import type { Model, Models } from './models.ts';
import type { PassedOn } from './pass-on.ts';
import { PassedBody } from './passed-body.ts';
import type { Endpoint } from './replies.ts';
import type { TextPool } from './text-pool.ts';
import type { UnderstoodPrompts } from './understand.ts';

export interface BodyReaderParts {
  readonly models: Pick<Models, 'readable' | 'isReading' | 'isWaiting' | 'version'>;
  readonly text: Pick<TextPool, 'run'>;
  readonly expected: Expected;
}

/** What is passed on, and its bytes while they are wanted. */
export type ToPass = Omit<PassedOn, 'passedOn'> & { readonly held: PassedBody };
export type Read = ToPass | (UnderstoodPrompts & { readonly readFor: Model });

export class BodyReader {
  readonly #parts: BodyReaderParts;

  constructor(parts: BodyReaderParts) {
    this.#parts = parts;
  }

  /**
   * `arrivedMs`: performance.now() of the request, which waits no longer than workers are expected from then on.
   * @throws HttpError: not understood; 404: no such model; KvError DISCONNECTED: it may still come, MODEL: its files cannot be read
   */
  async read(endpoint: Endpoint, body: Body, arrivedMs: number, signal: AbortSignal): Promise<Read> {
    const { models, expected } = this.#parts;
    for (;;) {
      const { version } = models;
      try {
        return await this.#now(endpoint, body, signal);
      } catch (error) {
        if (!(error instanceof KvError) || error.code !== 'DISCONNECTED' || !body.isKept) throw error;
        if (expected.isClosed) throw error;
        const lastMs = arrivedMs + expected.awayMs;
        const untilMs = models.isReading ? lastMs : Math.min(expected.untilMs(), lastMs);
        if (untilMs <= performance.now()) throw error;
        await expected.wait(() => models.version !== version, untilMs, signal);
      }
    }
  }

  async #now(endpoint: Endpoint, body: Body, signal: AbortSignal): Promise<Read> {
    const { models, text, expected } = this.#parts;
    const served = models.readable();
    const texts = served.map((model) => model.text);
    const keeps = models.isReading || expected.isSought;
    try {
      const understood = await body.use((bytes) => text.run(endpoint, texts, bytes, signal), keeps);
      if ('passedOn' in understood) {
        const { passedOn, ...rest } = understood;
        return { ...rest, held: new PassedBody(passedOn) };
      }
      return { ...understood, readFor: served.find(({ name }) => name === understood.model)! };
    } catch (error) {
      const isUnknown = error instanceof HttpError && error.body.error.code === 'model_not_found';
      if (!isUnknown || !(models.isWaiting || models.isReading)) throw error;
      // Workers that have not said yet what they serve may serve it.
      const { message } = error;
      throw new KvError('DISCONNECTED', `${message} Some workers are not reached yet; try again`, { retry: true });
    }
  }
}
