/**
 * A process with several engines that compute nothing: each answers at once, and then gives every running answer a token at every step, as
 * an engine with a batch does. Arguments: FOLDER COUNT TOKENS_PER_S MODEL_DIR. Prints "ready".
 *
 * With each token goes another id: the moment it was written, in microseconds of the machine's clock, modulo 2^31.
 */
import { randomBytes } from 'node:crypto';
import type { ServerWritableStream } from '@grpc/grpc-js';
import {
  type EngineLoad,
  EngineService,
  type GenerateEvent,
  type GenerateRequest,
  startGrpcServer,
  unary,
  type WatchLoadRequest,
} from '@kvtier/wire/grpc';
import { stamp } from './stamp.ts';

type Call = ServerWritableStream<GenerateRequest, GenerateEvent>;

const [folder, count, tokensPerS, modelDir] = process.argv.slice(2);
const idle = {
  draining: false,
  waiting: 0,
  running: 0,
  tokensAhead: 0n,
  usedBlocks: 0n,
  totalBlocks: 1_000_000n,
  waitingBlocks: 0n,
  loadAheadS: 0,
  rates: { prefillTokensPerS: 1e6, stepS: 0, stepPerRequestS: 0, freedBlocksPerS: 0, loadBlocksPerS: {} },
  taken: [],
};

async function serve(name: string): Promise<void> {
  const running = new Map<Call, number>();
  const bootEpoch = randomBytes(8).toString('hex');
  const give = (call: Call, given: number): void => {
    const isLast = given + 1 >= call.request.maxTokens;
    const tokenIds = [200 + (given % 3_000), stamp()];
    call.write({ tokenIds, finishReason: isLast ? 'length' : '', failure: undefined });
    if (!isLast) {
      running.set(call, given + 1);
      return;
    }
    running.delete(call);
    call.end();
  };
  setInterval(() => {
    for (const [call, given] of running) give(call, given);
  }, 1_000 / Number(tokensPerS));
  await startGrpcServer(`unix:${folder}/${name}`, (server) =>
    server.addService(EngineService, {
      describe: unary(() => ({
        model: 'fake',
        modelDir: modelDir!,
        maxModelTokens: 1 << 20,
        blockTokens: 16,
        vocabSize: 3_520,
        stopTokenIds: [2],
        backend: 'none',
        tierAttached: false,
        blockCount: 1_000_000n,
        blockBytes: 1n,
        hashAlgorithm: 'sha256_cbor',
        hashSeed: 'vllm-none-hash',
        modelDigest: 'ab'.repeat(32),
        bootEpoch,
      })),
      metrics: unary(() => ({ prometheus: '' })),
      pinPrefix: unary(() => ({ pinnedTokens: 0 })),
      unpinPrefix: unary(() => ({ done: false })),
      resetPrefixCache: unary(() => ({ done: true })),
      drain: unary(() => ({ left: 0 })),
      watchLoad: (call: ServerWritableStream<WatchLoadRequest, EngineLoad>) => {
        let told = 0n;
        const tell = (): void => void call.write({ ...idle, bootEpoch, count: ++told, running: running.size });
        const timer = setInterval(tell, 20);
        call.on('cancelled', () => clearInterval(timer));
        tell();
      },
      generate: (call: Call) => {
        call.on('cancelled', () => running.delete(call));
        give(call, 0);
      },
    }),
  );
}

await Promise.all(Array.from({ length: Number(count) }, (_, i) => serve(`e${i}`)));
process.stdout.write('ready\n');
