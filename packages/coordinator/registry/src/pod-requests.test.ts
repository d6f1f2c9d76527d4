/** Requests to one pod that says nothing of an answer for as long as one may: it is late, and no other pod is to compute it again. */
import { Readable } from 'node:stream';
import { type Dispatcher, errors, Pool } from 'undici';
import { afterEach, beforeEach, expect, it, vi } from 'vitest';
import { PodRequests } from './pod-requests.ts';

let requests: PodRequests;
let ended: number;
beforeEach(() => {
  ended = 0;
  requests = new PodRequests(
    { name: 'a', origin: new URL('http://127.0.0.1:9'), access: undefined },
    100,
    () => ended++,
  );
});
afterEach(async () => {
  vi.restoreAllMocks();
  await requests.close();
});
const ask = () => requests.forward('/v1/completions', {}, '{}', new AbortController().signal);
const late = {
  code: 'DEADLINE',
  retry: false,
  message: 'worker a: said nothing of an answer for 600 s; ask for a stream, or for fewer tokens',
};

it('before it begins', async () => {
  vi.spyOn(Pool.prototype, 'request').mockRejectedValue(new errors.HeadersTimeoutError());
  await expect(ask()).rejects.toMatchObject(late);
  expect([requests.size, ended]).toEqual([0, 1]);
});

it('in its midst', async () => {
  const body = Readable.from(
    (async function* () {
      yield Buffer.from('a');
      throw new errors.BodyTimeoutError();
    })(),
  );
  const answer = { statusCode: 200, headers: {}, body } as unknown as Dispatcher.ResponseData;
  vi.spyOn(Pool.prototype, 'request').mockResolvedValue(answer);
  const parts = (await ask()).body[Symbol.asyncIterator]();
  expect(String((await parts.next()).value)).toBe('a');
  await expect(parts.next()).rejects.toMatchObject(late);
  expect([requests.size, ended]).toEqual([0, 1]);
});
