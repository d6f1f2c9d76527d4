/**
 * The tokenizer is replaced between a worker's start and the API server's, as a rollout does it: real processes, real files. Nobody is
 * answered with ids that other weights would read as other words, and all is well when both have read the same.
 */
import { cpSync, mkdtempSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { modelDir, Service } from '../faults/engine-rig.ts';

const patience = { timeout: 60_000, interval: 50 };
let folder: string;
let copy: string;
let worker: Service;
let coordinator: Service;
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-text-'));
  copy = join(folder, 'model');
  cpSync(modelDir, copy, { recursive: true, dereference: true });
  const address = `unix:${join(folder, 'w')}`;
  const small = { cacheNodeSocket: null, kvBytes: 8 << 20, threads: 1, logLevel: 'warn' };
  worker = new Service('engine-worker', { modelDir: copy, servedName: 'demo', listen: address, ...small });
  coordinator = new Service('coordinator', { port: 0, engine: address, logLevel: 'warn' });
});
afterEach(async () => {
  for (const service of [coordinator, worker]) await service.signal('SIGTERM');
  rmSync(folder, { recursive: true, force: true });
});

/** As downloads do: a new file under the old name. */
function replaceTemplate(text: string): void {
  writeFileSync(join(folder, 'new'), text);
  renameSync(join(folder, 'new'), join(copy, 'chat_template.jinja'));
}

interface Answer {
  readonly status: number;
  readonly text: string;
}

async function chat(): Promise<Answer> {
  const body = JSON.stringify({ model: 'demo', messages: [{ role: 'user', content: 'a' }], max_tokens: 2 });
  const headers = { 'content-type': 'application/json' };
  const { url } = coordinator.ready.at(-1)! as { url: string };
  const response = await fetch(`${url}/v1/chat/completions`, { method: 'POST', headers, body });
  return { status: response.status, text: await response.text() };
}
const promptTokens = ({ text }: Answer): number =>
  (JSON.parse(text) as { usage: { prompt_tokens: number } }).usage.prompt_tokens;

/** Asks until it is so. */
async function until(isSo: (answer: Answer) => boolean): Promise<Answer> {
  let answer = await chat();
  await vi.waitUntil(async () => {
    if (!isSo(answer)) answer = await chat();
    return isSo(answer);
  }, patience);
  return answer;
}

it('refused in one line that says which files, until both have read the same; what was read serves on', async () => {
  await worker.start();
  replaceTemplate('another, and longer than the one before: {{ messages[0].content }}');
  await expect(coordinator.start()).rejects.toThrow(
    /\ncoordinator: MODEL: \S+: tokenizer and chat template have digest [0-9a-f]{16}, the model's workers loaded beside [0-9a-f]{16}; put those files back, or restart the workers\n$/,
  );
  await worker.signal('SIGTERM');
  await worker.start();
  await coordinator.start();
  const longer = promptTokens(await until(({ status }) => status === 200));

  // Behind both.
  replaceTemplate('{{ messages[0].content }}');
  const behind = await chat();
  expect([behind.status, promptTokens(behind)]).toEqual([200, longer]);
  // The worker has read the new one: whoever is answered from then on is answered by that.
  await worker.signal('SIGTERM');
  await worker.start();
  const after = await until(({ status }) => status === 200);
  expect(promptTokens(after)).toBeLessThan(longer);
});
