/**
 * A process with several engines that compute nothing: each answers at once, and then gives every running answer a token at every step, as
 * an engine with a batch does. Arguments: FOLDER COUNT TOKENS_PER_S MODEL_DIR. Prints "ready".
 *
 * They take many requests by one call (GenerateMany), as workers do; with KVTIER_BENCH_GENERATE=single they say that they do not, and get a call
 * for each. With KVTIER_BENCH_HANGS=WAY (generate, http or generateMany) one request that comes by that way gets its first token only, and
 * never ends.
 *
 * The same engines answer HTTP, too, at FOLDER/h0 and on, with the chunks that a coordinator would send: for who passes them on as they are.
 *
 * With each token goes another id: the moment it was written, in microseconds of the machine's clock, modulo 2^31. Who wants N tokens
 * asks for 2 N.
 */
import { randomBytes, randomUUID } from 'node:crypto';
import { createServer } from 'node:http';
import { json } from 'node:stream/consumers';
import type { ServerDuplexStream, ServerWritableStream } from '@grpc/grpc-js';
import {
  type EngineLoad,
  EngineService,
  type GenerateEvent,
  type GenerateEvents,
  type GenerateOrder,
  type GenerateRequest,
  type NumberedEvent,
  startGrpcServer,
  unary,
  type WatchLoadRequest,
} from '@kvtier/wire/grpc';
import { stamp } from './stamp.ts';

type ManyCall = ServerDuplexStream<GenerateOrder, GenerateEvents>;
/** A request, by whichever way it came. */
interface Call {
  readonly request: Pick<GenerateRequest, 'maxTokens'>;
  write(event: GenerateEvent): unknown;
  end(): void;
}

process.on('disconnect', () => process.exit()); // who started it has ended, however

const [folder, count, tokensPerS, modelDir] = process.argv.slice(2);
const generatesMany = process.env.KVTIER_BENCH_GENERATE !== 'single';
type Way = 'generate' | 'http' | 'generateMany';
/** The way of one request that hangs, until it has come. */
let hangsBy = process.env.KVTIER_BENCH_HANGS;
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
  ...{ taken: [], begun: [], ended: [] },
};

/** `share` of a step: engines do not step together. */
async function serve(name: string, share: number): Promise<void> {
  const running = new Map<Call, number>();
  const bootEpoch = randomBytes(8).toString('hex');
  const give = (call: Call, given: number): void => {
    const isLast = 2 * (given + 1) >= call.request.maxTokens;
    const tokenIds = [200 + (given % 3_000), stamp()];
    call.write({ tokenIds, finishReason: isLast ? 'length' : '', failure: undefined });
    if (!isLast) {
      running.set(call, given + 1);
      return;
    }
    running.delete(call);
    call.end();
  };
  const begin = (call: Call, way: Way): void => {
    if (way !== hangsBy || call.request.maxTokens <= 2) {
      give(call, 0);
      return;
    }
    hangsBy = undefined;
    call.write({ tokenIds: [200, stamp()], finishReason: '', failure: undefined });
  };
  /** What this turn has for calls that carry many. */
  const due = new Map<ManyCall, NumberedEvent[]>();
  const tell = (): void => {
    for (const [many, events] of due) many.write({ events });
    due.clear();
  };
  const tellOf = (many: ManyCall, number: number, event: GenerateEvent): void => {
    const events = due.get(many);
    if (events) events.push({ number, event });
    else due.set(many, [{ number, event }]);
  };
  const stepMs = 1_000 / Number(tokensPerS);
  const step = (): void => {
    for (const [call, given] of running) give(call, given);
    tell();
  };
  setTimeout(() => setInterval(step, stepMs), share * stepMs);
  createServer(async (asked, response) => {
    const { max_tokens: maxTokens } = (await json(asked)) as { max_tokens: number };
    response.writeHead(200, { 'content-type': 'text/event-stream; charset=utf-8' });
    const head = { id: `cmpl-${randomUUID()}`, object: 'text_completion', created: Math.floor(Date.now() / 1_000) };
    const call: Call = {
      request: { maxTokens },
      write: ({ tokenIds, finishReason }) => {
        const rest = { logprobs: null, finish_reason: finishReason || null, token_ids: tokenIds };
        const chunk = { ...head, model: 'fake', choices: [{ index: 0, text: ' token', ...rest }] };
        response.write(`data: ${JSON.stringify(chunk)}\n\n`);
      },
      end: () => response.end('data: [DONE]\n\n'),
    };
    response.once('close', () => running.delete(call));
    begin(call, 'http');
  }).listen(`${folder}/h${name.slice(1)}`);
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
        maxSequences: 0,
        maxStepTokens: 0,
        namespaces: [],
        generatesMany,
      })),
      metrics: unary(() => ({ prometheus: '' })),
      pinPrefix: unary(() => ({ pinnedTokens: 0 })),
      unpinPrefix: unary(() => ({ done: false })),
      resetPrefixCache: unary(() => ({ done: true })),
      drain: unary(() => ({ left: 0 })),
      watchLoad: (call: ServerWritableStream<WatchLoadRequest, EngineLoad>) => {
        let told = 0n;
        const tellLoad = (): void => void call.write({ ...idle, bootEpoch, count: ++told, running: running.size });
        const timer = setInterval(tellLoad, 20);
        call.on('cancelled', () => clearInterval(timer));
        tellLoad();
      },
      generate: (call: ServerWritableStream<GenerateRequest, GenerateEvent>) => {
        call.on('cancelled', () => running.delete(call));
        begin(call, 'generate');
      },
      generateMany: (many: ManyCall) => {
        const calls = new Map<number, Call>();
        many.on('data', ({ number, begin: request }: GenerateOrder) => {
          const left = calls.get(number);
          if (left) running.delete(left);
          calls.delete(number);
          if (request === undefined) return;
          const call = {
            request,
            write: (event: GenerateEvent) => tellOf(many, number, event),
            end: () => calls.delete(number),
          };
          calls.set(number, call);
          begin(call, 'generateMany');
          tell();
        });
        many.on('cancelled', () => {
          for (const call of calls.values()) running.delete(call);
        });
      },
    }),
  );
}

await Promise.all(Array.from({ length: Number(count) }, (_, i) => serve(`e${i}`, i / Number(count))));
process.stdout.write('ready\n');
