/** Who may tell pods where blocks come from, go to and stay: who administers, and everybody where the configuration says so. */
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { PodHandOff } from '@kvtier/pod-handoff';
import { Pod } from '@kvtier/registry/testing';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest';
import type { ApiServerOptions } from './api-server.ts';
import { Harness } from './testing/harness.ts';

const at = new Harness();
const patience = { timeout: 20_000 };
const [user, admin] = ['sk-user-0123456789', 'sk-admin-0123456789'];
const one = Object.assign(new Pod(), { model: 'pods' });
let folder: string;

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-params-'));
  writeFileSync(join(folder, 'keys'), `${user}\n`, { mode: 0o600 });
  writeFileSync(join(folder, 'admins'), `${admin}\n`, { mode: 0o600 });
});
afterAll(() => rmSync(folder, { recursive: true }));
beforeEach(async () => {
  one.seen.length = 0;
  one.answer = ({ response }) => void response.writeHead(200, { 'content-type': 'application/json' }).end('{"ok":1}');
  await one.start();
});
afterEach(() => one.stop());

async function open(clientParams: boolean, keys: Pick<ApiServerOptions, 'apiKeysFile' | 'adminKeysFile'>) {
  const choose: typeof at.dispatcher.choose = (...asked) => at.dispatcher.choose(...asked);
  const calls = { workers: () => at.fleet.workers(), forward: () => Promise.reject(new Error('nobody prefills')) };
  await at.open({ ...keys, pods: new PodHandOff({ dispatch: { choose }, pods: calls, config: { clientParams } }) });
  await at.workers({ name: 'one', kind: 'openai', address: one.address });
  const models = () => fetch(`${at.server.url}/v1/models`, { headers: { authorization: `Bearer ${user}` } });
  await vi.waitUntil(async () => (await models()).status === 200, patience);
}
const both = () => ({ apiKeysFile: join(folder, 'keys'), adminKeysFile: join(folder, 'admins') });

const body = { model: 'pods', prompt: 'a long prompt' };
const sent = (): unknown[] => one.seen.map(({ body }) => JSON.parse(body));
/** Status, and what is said of a refusal. */
async function ask(part: object, key?: string, path = '/v1/completions') {
  const authorization = key === undefined ? {} : { authorization: `Bearer ${key}` };
  const response = await at.post(
    path,
    { ...body, ...part },
    {
      headers: { 'content-type': 'application/json', ...authorization },
    },
  );
  const { error } = (await response.json()) as { error?: object };
  return [response.status, error];
}

const forms: [string, string, object][] = [
  ['wants blocks fetched', 'kv_transfer_params', { kv_transfer_params: { do_remote_prefill: true } }],
  ['names a host', 'kv_transfer_params', { kv_transfer_params: { remote_host: '10.0.0.9', remote_port: 22 } }],
  [
    'names blocks of a pod',
    'kv_transfer_params',
    { kv_transfer_params: { do_remote_prefill: true, remote_engine_id: 'p', remote_block_ids: [[1, 2]] } },
  ],
  ['has blocks held', 'kv_transfer_params', { kv_transfer_params: { do_remote_decode: true } }],
  ['hints there', 'kv_transfer_params', { kv_transfer_params: { kv_hints: { actions: [] } } }],
  ['promises, as our connector', 'kv_transfer_params', { kv_transfer_params: { kvtier: { ticket: 'x', load: true } } }],
  ['chooses, and more', 'kv_transfer_params', { kv_transfer_params: { kvtier: { load: false }, remote_port: 1 } }],
  ['chooses by no boolean', 'kv_transfer_params', { kv_transfer_params: { kvtier: { load: {} } } }],
  ['is no object', 'kv_transfer_params', { kv_transfer_params: 'x' }],
  ['hints', 'kv_hints', { kv_hints: { protocol_version: '0.1', actions: [] } }],
  ['says it as an argument', 'vllm_xargs.kv_transfer_params', { vllm_xargs: { kv_transfer_params: 'x' } }],
  ['has an encoder named', 'ec_transfer_params', { ec_transfer_params: { peer_host: '10.0.0.9', peer_port: 1 } }],
  ['names a host to SGLang', 'bootstrap_host', { bootstrap_host: '10.0.0.9' }],
  ['names a room to SGLang', 'bootstrap_room', { bootstrap_room: 0 }],
];
const refusal = (param: string) => [
  400,
  {
    message:
      `${param}: tells pods where blocks of a prompt come from, go to or stay, which clients may not. Leave it out, ` +
      'send it with a key of adminKeysFile, or let all clients (podHandOff.clientParams).',
    type: 'invalid_request_error',
    param,
    code: 'transfer_not_allowed',
  },
];

describe('by default', () => {
  it.each(forms)(
    'a body that %s is refused, and no pod is asked; one of an administrator goes on',
    async (_, name, part) => {
      await open(false, both());
      expect(await ask(part, user)).toEqual(refusal(name));
      expect(await ask({ ...part, messages: [] }, user, '/v1/chat/completions')).toEqual(refusal(name));
      expect(sent()).toEqual([]);
      expect(await ask(part, admin)).toEqual([200, undefined]);
      expect(sent()).toEqual([{ ...body, ...part }]);
    },
  );

  it.each<[string, object]>([
    ['does without the store', { kv_transfer_params: { kvtier: { load: false, store: true } } }],
    ['leaves it as it is without', { kv_transfer_params: { kvtier: { load: null } } }],
    [
      'writes out what it leaves away',
      {
        kv_transfer_params: { do_remote_prefill: false, do_remote_decode: false, remote_host: null },
        ...{ bootstrap_port: [null], vllm_xargs: { kv_transfer_params: null } },
      },
    ],
    ['says nothing of it', { kv_transfer_params: null, kv_hints: {}, bootstrap_host: null, vllm_xargs: { a: 1 } }],
  ])('whoever %s may', async (_, part) => {
    await open(false, both());
    expect(await ask(part, user)).toEqual([200, undefined]);
    expect(sent()).toEqual([{ ...body, ...part }]);
  });

  it('without keys, and with keys for all, nobody administers what pods believe', async () => {
    for (const keys of [{}, { apiKeysFile: join(folder, 'keys') }]) {
      await open(false, keys);
      expect(await ask(forms[0]![2], user)).toEqual(refusal('kv_transfer_params'));
    }
    expect(sent()).toEqual([]);
  });
});

it('where the configuration lets all clients, they may', async () => {
  await open(true, both());
  for (const [, , part] of forms) expect(await ask(part, user)).toEqual([200, undefined]);
  expect(sent()).toEqual(forms.map(([, , part]) => ({ ...body, ...part })));
});
