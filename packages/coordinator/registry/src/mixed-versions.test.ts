/** A worker of another version, by bytes of its gRPC messages. */
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { Server, ServerCredentials, type ServerWritableStream } from '@grpc/grpc-js';
import { Description, type GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { EngineCalls } from './engine-calls.ts';
import { factsOf } from './facts.ts';

let folder: string;
const ends: (() => unknown)[] = [];
beforeEach(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-mixed-'));
});
afterEach(() => {
  for (const end of ends.splice(0).reverse()) end();
  rmSync(folder, { recursive: true });
});

const bytes = (hex: string): Buffer => Buffer.from(hex.replaceAll(' ', ''), 'hex');
/** Of the first version: model "m", model_dir "/m", 4096 tokens at most, blocks of 16, 512 words, backend "cpu". */
const older = '0a016d 12022f6d 188020 2010 288004 3a03637075';
/** A field that nobody knows. */
const unknown = 'a206 02 6869';
const token = '0a0105'; // token_ids: 5
const end = '12 04 73746f70'; // finish_reason: "stop"
const raw = <T>(value: T): Buffer => value as Buffer;
const whole = (value: Buffer): Buffer => value;

/** Describe and Generate, and nothing else. */
async function worker(description: string, events: readonly string[]): Promise<EngineCalls> {
  const server = new Server();
  const at = (name: string): string => `/kvtier.v1.Engine/${name}`;
  server.register(
    at('Describe'),
    ((_: unknown, done: (error: null, value: Buffer) => void) => done(null, bytes(description))) as never,
    ...([raw, whole, 'unary'] as const),
  );
  server.register(
    at('Generate'),
    ((call: ServerWritableStream<Buffer, Buffer>) => {
      for (const event of events) call.write(bytes(event));
      call.end();
    }) as never,
    ...([raw, whole, 'serverStream'] as const),
  );
  const address = `unix:${join(folder, 's')}`;
  await new Promise<void>((resolve, reject) =>
    server.bindAsync(address, ServerCredentials.createInsecure(), (error) => (error ? reject(error) : resolve())),
  );
  ends.push(() => server.forceShutdown());
  const calls = new EngineCalls({ address });
  ends.push(() => calls.close());
  return calls;
}

const request = GenerateRequest.decode(bytes('0a0172 120101 1804'));

async function told(calls: EngineCalls): Promise<GenerateEvent[]> {
  const events: GenerateEvent[] = [];
  await calls.follow(request, AbortSignal.timeout(10_000), (event) => void events.push(event));
  return events;
}

it.each([
  ['an older one', older, [token, end]],
  ['a newer one', older + unknown, [token + unknown, unknown, end + unknown]],
])('%s says what it is, and answers', async (_, description, events) => {
  const calls = await worker(description, events);
  expect(factsOf('w', await calls.describe())).toMatchObject({
    ...{ model: 'm', blockTokens: 16, vocabSize: 512, totalBlocks: 0, bootEpoch: '' },
    ...{ maxStepTokens: undefined, maxRunning: undefined, namespaces: undefined },
  });
  const seen = await told(calls);
  expect(seen.flatMap(({ tokenIds }) => [...tokenIds])).toEqual([5]);
  expect(seen.at(-1)!.finishReason).toBe('stop');
});

it('an older one is asked what it does not know: that fails by itself, and no other call does', async () => {
  const calls = await worker(older, [token, end]);
  await calls.describe();
  await expect(calls.drain()).rejects.toMatchObject({ name: 'KvError' });
  expect((await told(calls)).length).toBe(2);
});

it('what is not said is nothing, and what is not known is left out', () => {
  expect(Description.decode(bytes(older + unknown))).toEqual(Description.decode(bytes(older)));
  expect(Description.decode(bytes(older))).toMatchObject({ generatesMany: undefined, namespaces: [], maxSequences: 0 });
});
