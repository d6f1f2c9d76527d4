/** The tokens of a request are of no use to any worker that is ready: they are made anew, or the client comes again. */
import { KvError } from '@kvtier/errors';

export class Outdated extends KvError {
  constructor(model: string) {
    const why = 'its tokenizer or chat template was replaced after the request was read';
    super('DISCONNECTED', `model ${model}: ${why}; try again`, { retry: true });
  }
}
