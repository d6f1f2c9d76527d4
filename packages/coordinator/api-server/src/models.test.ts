/** The models that are served, as they follow the workers. */
import { factsOf, recordOf } from '@kvtier/dispatch/testing';
import { KvError } from '@kvtier/errors';
import type { Worker } from '@kvtier/registry';
import { createLogger } from '@kvtier/telemetry';
import { afterEach, beforeEach, describe, expect, it, vi } from 'vitest';
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
  await vi.waitFor(() => expect(names()).toEqual(['a', 'b']), { timeout: 20_000 });
  told.mockClear();
  looks = 0;
  for (let i = 0; i < 100; i++) become(worker(0, 'a'), worker(1, 'b'));
  await new Promise(setImmediate);
  expect(looks).toBeLessThanOrEqual(ofOne);
  expect(told).toHaveBeenCalledTimes(1);
});

it('a chat template that renders nothing is told once, and the model is served', async () => {
  const logger = createLogger('models-test', 'silent');
  const warn = vi.spyOn(logger, 'warn');
  const load = async () => ({ chatProblem: 'dir: chats will be refused' }) as LoadedText;
  const engines = { workers: () => workers, onChange: () => () => {} };
  const of = new Models({ engines, text: { load }, tokenizers: {}, logger });
  await of.start(1_000);
  expect(of.get('a')).toMatchObject({ name: 'a', maxModelTokens: 4096 });
  expect(warn.mock.calls).toEqual([[{ model: 'a', code: 'MODEL' }, 'dir: chats will be refused']]);
  of.close();
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

describe('the start', () => {
  const joining = { number: 1, record: recordOf('w1'), state: 'joining', facts: undefined } as unknown as Worker;
  const started = async (...first: Worker[]): Promise<{ end: Promise<unknown>; of: Models }> => {
    workers = first;
    const engines = {
      workers: () => workers,
      onChange: (listener: () => void) => {
        tell = listener;
        return () => {};
      },
    };
    const load = async ({ name }: { name: string }): Promise<LoadedText> => {
      if (name === 'bad') throw new KvError('MODEL', '/m/tokenizer.json: cannot be read');
      return {} as LoadedText;
    };
    const of = new Models({ engines, text: { load }, tokenizers: {}, logger: createLogger('models-test', 'silent') });
    return { end: of.start(60_000).then(() => 'served', String), of };
  };

  it('fails where no model can be served', async () => {
    const { end, of } = await started(worker(0, 'bad'));
    expect(await end).toContain('/m/tokenizer.json: cannot be read');
    of.close();
  });

  it('waits for a worker that may serve another model', async () => {
    const { end, of } = await started(worker(0, 'bad'), joining);
    await vi.waitFor(() => expect(() => of.served()).toThrow('cannot be read'), { timeout: 20_000 });
    become(worker(0, 'bad'), worker(1, 'good'));
    expect(await end).toBe('served');
    expect(of.all().map(({ name }) => name)).toEqual(['good']);
    of.close();
  });
});

it('nothing is looked at after the end', async () => {
  become(worker(1, 'b'));
  models.close();
  looks = 0;
  await new Promise(setImmediate);
  expect(looks).toBe(0);
});
