/** Whether anybody tells when a prefill pod has computed a prompt: who asks it itself does, who only names it does not. */
import type { Choice, Dispatch, DispatchRequest } from '@kvtier/dispatch';
import { recordOf } from '@kvtier/dispatch/testing';
import type { Worker } from '@kvtier/registry';
import { expect, it } from 'vitest';
import { PodHandOff, type Routed } from './index.ts';

const routed: Routed = {
  ...{ id: 'r', model: 'demo', among: undefined, session: '', isStreamed: false },
  ...{ tokens: 2_000, blockTokens: 16, maxTokens: 300, keys: new Int32Array(250) },
};
const asked: DispatchRequest[] = [];
const told: string[] = [];
const dispatch: Dispatch = {
  choose: async (request) => {
    asked.push(request);
    const worker = { number: 1, record: recordOf('p1', { kind: 'openai', role: 'prefill' }) } as Worker;
    const firstToken = (isTimed?: boolean): void => void told.push(`first ${isTimed}`);
    return { worker, firstToken, ended: () => void told.push('ended') } as Partial<Choice> as Choice;
  },
};
const answer = async function* () {
  yield Buffer.from('{"kv_transfer_params":{"kvtier":1}}');
};
const pods = new PodHandOff({
  dispatch,
  pods: { workers: () => [], forward: async () => ({ status: 200, headers: {}, body: answer() }) },
});
const among = new Set(['p1']);
const never = new AbortController().signal;

it('of a leg that is asked here its answer tells it', async () => {
  const request = { routed, path: '/v1/completions', headers: {}, body: new Uint8Array() };
  expect(await pods.prefill(request, among, never)).toEqual({ worker: 'p1', revision: '', params: '{"kvtier":1}' });
  expect(asked.splice(0)).toMatchObject([{ id: 'r-prefill', maxTokens: 1, role: 'prefill', isStreamed: true }]);
  expect(told.splice(0)).toEqual(['first true', 'ended']);
});

it('of a pod that is only named nobody does', async () => {
  await pods.choosePrefill(routed, among, new Set(), never);
  expect(asked.splice(0)).toMatchObject([{ id: 'r-prefill', maxTokens: 1, role: 'prefill', isStreamed: false }]);
  expect(told).toEqual([]);
});
