/** The simulation's workers tell their load as real ones do. */
import { expect, it } from 'vitest';
import { blockTokens, VirtualWorker, VirtualWorkers } from './virtual-workers.ts';
import { World } from './world.ts';

it('of a prompt that another worker computes only the rest is ahead, however much of it has come', async () => {
  const world = new World(1);
  const [blocks, rest] = [10, 5];
  const worker = new VirtualWorker(0, 'decode', 100, 1_000, 1);
  const workers = new VirtualWorkers(world, [worker]);
  worker.node.set(7, 4);
  const request = {
    ...{ requestId: 'r', promptTokenIds: new Array<number>(blocks * blockTokens + rest).fill(7), maxTokens: 4 },
    ...{ temperature: 0, topK: 0, topP: 1, seed: undefined, ignoreEos: false, stopTokenIds: [], cacheSalt: '' },
    ...{ loraName: '', handOff: { blocks, stallMs: 1_000, deadlineMs: 2_000 } },
  };
  const ahead: number[] = [];
  const client = new AbortController();
  const ended = workers.follow(0, request, client.signal, ({ handOff }) => {
    ahead.push(worker.load.tokensAhead);
    if (handOff?.readyBlocks === 4) client.abort(new Error('left'));
  });
  const seen = expect(ended).rejects.toThrow('left');
  while (!client.signal.aborted && (await world.step()));
  await seen;
  expect(ahead).toEqual([rest, rest, rest, rest, rest]);
});
