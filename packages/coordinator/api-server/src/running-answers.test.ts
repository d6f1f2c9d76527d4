/** Answers that run: what of them is a sign of life. */
import { connect } from 'node:net';
import { event } from '@kvtier/registry/testing';
import { it, vi } from 'vitest';
import { Harness, ids } from './testing/harness.ts';

const patience = { timeout: 20_000 };
const at = new Harness();

type Progress = { readonly running: number; readonly silent_ms: number };
const progress = async (): Promise<Progress> => {
  const health = (await (await fetch(`${at.server.url}/health`)).json()) as { readonly progress: Progress };
  return health.progress;
};

it('a slow reader of large answers that are over is no standstill', async () => {
  at.engine.description = { ...at.engine.description, maxModelTokens: 131_072 };
  await at.open();
  at.engine.script = (call) => {
    call.write(event({ tokenIds: ids(' 34'), finishReason: 'length' })); // its only sign
    call.end();
  };
  const n = 40;
  // 52 MB: more than the kernel takes for it.
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
  let left = 26 << 20;
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
