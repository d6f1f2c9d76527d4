/** Bodies whose model is not there yet: what is waited for, and that nothing is behind our own end. */
import { expect, it } from 'vitest';
import type { Body } from './bodies.ts';
import { BodyReader } from './body-reader.ts';
import { HttpError } from './errors.ts';
import { Expected } from './expected.ts';

it('after our end nobody waits, though a model is being read', async () => {
  let reads = 0;
  const run = async () => {
    reads++;
    throw new HttpError(404, 'The model does not exist.', { code: 'model_not_found' });
  };
  const expected = new Expected({ engines: { workers: () => [] }, awayMs: 200 });
  const models = { readable: () => [], isReading: true, isWaiting: false, version: 1 };
  const reader = new BodyReader({ models, text: { run }, expected });
  const body = { isKept: true, use: (read: (bytes: ArrayBuffer) => unknown) => read(new ArrayBuffer(0)) };
  expected.close();
  const reading = reader.read('chat', body as unknown as Body, performance.now(), new AbortController().signal);
  await expect(reading).rejects.toMatchObject({ code: 'DISCONNECTED' });
  expect(reads).toBe(1);
});
