/** What is refused of a text by itself, and what is read of one whose tokenizer is gone. */
import { KvError } from '@kvtier/errors';
import { expect, it } from 'vitest';
import type { HttpError } from './errors.ts';
import { passOn } from './pass-on.ts';
import { modelDir } from './testing/harness.ts';
import type { TextModel } from './text-model.ts';
import { loadTokenizer } from './tokenizer.ts';
import { type BodyKind, type UnderstoodPrompts, understand } from './understand.ts';

const tokenizer = loadTokenizer(modelDir);
const model: TextModel = {
  ...{ name: 'demo', modelDir, maxModelTokens: 1 << 20, vocabSize: 3_520, blocks: undefined, isPassedOn: false },
};
const read = (kind: BodyKind, body: object) =>
  understand(kind, Buffer.from(JSON.stringify(body)), [model], () => tokenizer) as UnderstoodPrompts;
function refused(kind: BodyKind, body: object): HttpError['body']['error'] {
  try {
    read(kind, body);
  } catch (error) {
    return (error as HttpError).body.error;
  }
  throw new Error('it was not refused');
}

it('echoes that a whole answer cannot hold are refused, and streamed all the same', () => {
  const prompt = 'Age: 17. '.repeat(10_000);
  const asked = { prompt, echo: true, n: 12 };
  expect(refused('completion', asked)).toMatchObject({
    ...{ param: 'echo', code: 'invalid_value' },
    message: `echo: the prompts of all answers have ${12 * prompt.length} characters; at most 1048576 where stream is false. Stream them, or leave echo out.`,
  });
  expect(read('completion', { ...asked, stream: true }).echoes).toEqual([prompt]);
  expect(read('completion', { ...asked, n: 11 }).echoes).toEqual([prompt]);
  expect(read('completion', { ...asked, echo: false }).echoes).toEqual(['']);
});

it('a text without a break is refused for that, and not for the model’s context', () => {
  const why = '300000 characters without a break; at most 262144; put spaces or line breaks between them';
  const content = 'a'.repeat(300_000);
  expect(refused('completion', { prompt: content })).toMatchObject({ param: 'prompt', message: `prompt: ${why}` });
  const chat = refused('chat', { messages: [{ role: 'user', content }] });
  expect(chat).toMatchObject({ param: 'messages', code: 'invalid_value' });
  expect(chat.message).toMatch(/^messages: 300\d+ characters without a break/);
});

it('a prompt for a pod whose tokenizer cannot be read any more is taken as text', () => {
  const gone = (): never => {
    throw new KvError('MODEL', `${modelDir}/tokenizer.json: cannot be read (ENOENT)`);
  };
  const prompt = 'Age: 17. '.repeat(100);
  const facts = passOn('completion', { prompt }, { ...model, isPassedOn: true }, gone);
  expect(facts).toEqual(passOn('completion', { prompt }, { ...model, isPassedOn: true, modelDir: '' }, gone));
  expect([facts.tokens, facts.blockTokens]).toEqual([225, 64]);
});
