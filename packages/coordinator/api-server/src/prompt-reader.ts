/**
 * What routing has to know of a request for a pod that does not come through this server: a gateway sends it, and we only say where to.
 * The same models, threads and hashes as for the bodies that we pass on (pass-on.ts); whatever is wrong with a body is the pod's to say.
 */
import { KvError } from '@kvtier/errors';
import type { Engines } from './engines.ts';
import type { Models } from './models.ts';
import type { PassedOn } from './pass-on.ts';
import type { LoadedText, TextPool } from './text-pool.ts';
import { whyNoTransfer } from './transfer.ts';

export interface PromptFacts
  extends Omit<
    PassedOn,
    'otherName' | 'passedOn' | 'members' | 'transferIn' | 'isTransfer' | 'isLoan' | 'unsplit' | 'cacheHitThreshold'
  > {
  readonly unsplit?: string | undefined;
  /** Why it is refused, as long as clients may not say where blocks come from or go to: `PodHandOffConfig.clientParams`. */
  readonly whyNoTransfer?: string;
  /** It brings a loan of blocks that is good once: whoever fails with it, nobody else gets it. */
  readonly isLoan?: true;
  /** Names of the only pods that know the name that the body has for its model; undefined: all of the model do. */
  readonly among?: ReadonlySet<string> | undefined;
}

export interface PromptReaderParts {
  readonly models: Pick<Models, 'all' | 'among'>;
  readonly engines: Pick<Engines, 'workers'>;
  readonly text: Pick<TextPool, 'run'>;
}

export class PromptReader {
  readonly #parts: PromptReaderParts;

  constructor(parts: PromptReaderParts) {
    this.#parts = parts;
  }

  /**
   * `body`: the bytes of a POST to `path`, whatever stands in front of OpenAI's name; they move to a thread.
   * @throws KvError REQUEST (another path), DISCONNECTED (no pod's model is known), HttpError (not understood, another model), or what
   * TextPool.run throws
   */
  async read(path: string, body: ArrayBuffer, signal: AbortSignal): Promise<PromptFacts> {
    const kind = /\/chat\/completions$/.test(path) ? 'chat' : /\/completions$/.test(path) ? 'completion' : undefined;
    if (kind === undefined) throw new KvError('REQUEST', `${path.slice(0, 200)}: has no prompt that is known here`);
    const served = this.#ofPods();
    if (served.length === 0) throw new KvError('DISCONNECTED', 'no pod has said yet what it serves; try again');
    const understood = await this.#parts.text.run(kind, served, body, signal);
    if (!('passedOn' in understood))
      throw new Error(`a body for ${understood.model} was read as one of our own workers'`);
    const { model, otherName, tokens, maxTokens, blockTokens, keys, session, unsplit, isLoan, transferIn } = understood;
    const among = otherName && this.#parts.models.among(otherName.name);
    return {
      ...{ model, tokens, maxTokens, blockTokens, keys, session },
      ...(among && { among }),
      ...(unsplit !== undefined && { unsplit }),
      ...(isLoan && { isLoan }),
      ...(transferIn !== undefined && { whyNoTransfer: whyNoTransfer(transferIn) }),
    };
  }

  /** Also those that our own workers serve, too: a gateway reaches none of these. */
  #ofPods(): LoadedText[] {
    const names = new Set<string>();
    for (const worker of this.#parts.engines.workers())
      if (worker?.record.kind === 'openai' && worker.facts !== undefined && worker.state !== 'refused')
        names.add(worker.facts.model);
    return this.#parts.models
      .all()
      .filter(({ name }) => names.has(name))
      .map(({ text }) => (text.model.isPassedOn ? text : { ...text, model: { ...text.model, isPassedOn: true } }));
  }
}
