/** The models that are served, as they follow the workers. */
import { factsOf, recordOf } from '@kvtier/dispatch/testing';
import type { Worker } from '@kvtier/registry';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { Models } from './models.ts';
import type { LoadedText } from './text-pool.ts';

let workers: Worker[];
let looks: number;
let tell: () => void;
let models: Models;
const told = vi.fn();
const worker = (number: number, model: string): Worker =>
  ({ number, record: recordOf(`w${number}`), state: 'ready', facts: factsOf({ model, modelDir: '/m' }) }) as Worker;
const become = (...next: Worker[]): void => {
  workers = next;
  tell();
};
const names = (): string[] => models.all().map(({ name }) => name);

beforeEach(async () => {
  workers = [worker(0, 'a')];
  const engines = {
    workers: () => {
      looks++;
      return workers;
    },
    onChange: (listener: () => void) => {
      tell = listener;
      return () => {};
    },
  };
  const text = { load: async () => ({}) as LoadedText };
  const logger = createLogger('models-test', 'silent');
  models = new Models({ engines, text, tokenizers: {}, logger, onChange: told });
  await models.start(1_000);
  looks = 0;
  told.mockClear();
});
afterEach(() => models.close());

it('changes of one turn are looked at once, soon', async () => {
  const version = models.version;
  become(worker(0, 'a'), worker(1, 'b'));
  expect(models.version).toBeGreaterThan(version);
  const ofOne = looks;
  await vi.waitFor(() => expect(names()).toEqual(['a', 'b']));
  told.mockClear();
  looks = 0;
  for (let i = 0; i < 100; i++) become(worker(0, 'a'), worker(1, 'b'));
  await new Promise(setImmediate);
  expect(looks).toBeLessThanOrEqual(ofOne);
  expect(told).toHaveBeenCalledTimes(1);
});

it('who asks sees the workers that there are', () => {
  become(worker(1, 'b'));
  expect(models.get('a')).toBeUndefined();
  expect(models.leftAtMs('a')).toBeLessThanOrEqual(performance.now());
  expect(models.isReading).toBe(true);
  become(worker(0, 'a'));
  expect([names(), models.leftAtMs('a')]).toEqual([['a'], undefined]);
  become();
  expect(models.all()).toEqual([]);
  expect(() => models.served()).toThrow('no worker is known');
});

it('nothing is looked at after the end', async () => {
  become(worker(1, 'b'));
  models.close();
  looks = 0;
  await new Promise(setImmediate);
  expect(looks).toBe(0);
});
