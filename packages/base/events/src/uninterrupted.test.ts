import { expect, it } from 'vitest';
import { uninterrupted } from './uninterrupted.ts';

it('is made again after a signal only', async () => {
  const answers = ['EINTR', 'EINTR', 'EADDRINUSE'].map((code) => Object.assign(new Error(code), { code }));
  let calls = 0;
  await expect(uninterrupted(() => Promise.reject(answers[calls++]!))).rejects.toBe(answers[2]);
  expect(calls).toBe(3);
  expect(await uninterrupted(() => Promise.resolve(7))).toBe(7);
});
