/** Answers that run: how many there may be, and what of them is a sign of life. */
import { connect } from 'node:net';
import { event } from '@kvtier/registry/testing';
import { describe, expect, it, vi } from 'vitest';
import { RunningAnswers } from './running-answers.ts';
import { Harness, ids } from './testing/harness.ts';

const patience = { timeout: 20_000 };
const at = new Harness();

type Progress = { readonly running: number; readonly silent_ms: number };
const progress = async (): Promise<Progress> => {
  const health = (await (await fetch(`${at.server.url}/health`)).json()) as { readonly progress: Progress };
  return health.progress;
};

describe('how many there may be', () => {
  it('a model alone may have all of them, and one beside others half of what these leave', async () => {
    let models = 1;
    const answers = new RunningAnswers(
      8,
      () => models,
      () => {},
    );
    const of = (model: string, count?: number) => {
      let open = (): void => {};
      const gate = new Promise<void>((resolve) => {
        open = resolve;
      });
      const done = answers.counted(model, count ?? 1, false, () => gate);
      const end = (): Promise<void> => {
        open();
        return done;
      };
      return { done, end };
    };
    const all = of('a', 8);
    await expect(of('a').done).rejects.toMatchObject({
      ...{ code: 'BUSY', message: expect.stringContaining('8 of 8 answers are being generated already') },
    });
    await all.end();

    models = 2;
    const half = of('a', 4);
    await expect(of('a').done).rejects.toMatchObject({
      ...{ code: 'BUSY', message: expect.stringContaining('4 of the 4 answers that model a may have beside others') },
    });
    const [one, two] = [of('b'), of('b')];
    await expect(of('b').done).rejects.toMatchObject({ code: 'BUSY' });
    await half.end();
    const more = [of('a'), of('a'), of('a')];
    await expect(of('a').done).rejects.toMatchObject({ code: 'BUSY' });
    for (const running of [one, two, ...more]) await running.end();
    expect(answers.progress).toMatchObject({ running: 0, finished: 17 });
  });

  it('one request is let in with all its answers, where there is room', async () => {
    const answers = new RunningAnswers(
      8,
      () => 2,
      () => {},
    );
    expect(await answers.counted('a', 8, true, async () => 'done')).toBe('done');
    await expect(answers.counted('a', 9, true, async () => 'done')).rejects.toMatchObject({ code: 'BUSY' });
  });
});

it('one model’s requests that pile up leave another one’s workers theirs', async () => {
  const other = await at.start('b');
  other.description = { ...other.description, model: 'other', modelDigest: 'cd'.repeat(32) };
  await at.open({ limits: { answersRunning: 8 } });
  await at.workers(at.named('a'), at.named('b'));
  await vi.waitUntil(async () => (await at.client.models.list()).data.length === 2, patience);
  at.engine.script = () => {};
  other.script = (call) => {
    call.write(event({ tokenIds: ids(' 34'), finishReason: 'length' }));
    call.end();
  };
  const leave = new AbortController();
  const ask = (model: string): Promise<Response> =>
    at.post('/v1/completions', { model, prompt: [5, 6] }, { signal: leave.signal });
  const told: unknown[] = [];
  const piled = Array.from({ length: 8 }, async () => {
    told.push(
      await ask('demo').then(
        ({ status }) => status,
        () => 'left',
      ),
    );
  });
  await vi.waitUntil(() => at.engine.seen.length === 4 && told.length === 4, patience);
  expect((await ask('other')).status).toBe(200);
  leave.abort();
  await Promise.all(piled);
  expect(told).toEqual([429, 429, 429, 429, 'left', 'left', 'left', 'left']);
});

it('a slow reader of large answers that are over is no standstill', async () => {
  at.engine.description = { ...at.engine.description, maxModelTokens: 131_072 };
  await at.open();
  at.engine.script = (call) => {
    call.write(event({ tokenIds: ids(' 34'), finishReason: 'length' })); // its only sign
    call.end();
  };
  const n = 20;
  // 26 MB: more than the kernel takes for it.
  const body = JSON.stringify({ prompt: ' Photographer'.repeat(100_000), echo: true, n, stream: true });
  const socket = connect(Number(new URL(at.server.url).port), '127.0.0.1').pause();
  const head = 'POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json';
  socket.write(`${head}\r\ncontent-length: ${body.length}\r\n\r\n${body}`);
  const marginMs = 500;
  const isSilent = async (): Promise<boolean> => {
    const { running, silent_ms } = await progress();
    return running === n && silent_ms > marginMs;
  };
  await vi.waitUntil(isSilent, patience);

  const readsAtMs = performance.now();
  let left = 13 << 20;
  socket.on('data', (bytes) => {
    left -= bytes.length;
    if (left <= 0) socket.pause();
  });
  socket.resume();
  // A sign that came since it reads, while all of it still runs.
  const isNoticed = async (): Promise<boolean> => {
    const readForMs = performance.now() - readsAtMs;
    const { running, silent_ms } = await progress();
    return running === n && silent_ms < readForMs + marginMs;
  };
  await vi.waitUntil(isNoticed, patience);
  socket.destroy();
  await vi.waitUntil(async () => (await progress()).running === 0, patience);
}, 90_000); // each wait may take as long as its patience
