/** Which `kv_transfer_params` may be shown to a second pod. */
import { expect, it } from 'vitest';
import { isLoan } from './transfer.ts';

const promise = { do_remote_prefill: true, do_remote_decode: false, remote_port: 0, remote_host: '127.0.0.1' };
const deep = JSON.parse(`${'['.repeat(50_000)}${']'.repeat(50_000)}`) as unknown;

it.each<[string, unknown, boolean]>([
  ['blocks of NIXL', { ...promise, remote_engine_id: 'p', remote_block_ids: [[1, 2]] }, true],
  ['one list of them', { do_remote_prefill: true, remote_block_ids: [7] }, true],
  ['blocks, whatever else is said', { remote_block_ids: [[], [1]], kvtier: {} }, true],
  ['what is no list', { remote_block_ids: 'all', kvtier: {} }, true],
  ['lists in lists', { remote_block_ids: deep, kvtier: {} }, true],
  ['a transfer that has a name only', { transfer_id: 'tx1' }, true],
  ['an engine that has a name only', { remote_engine_id: 'p' }, true],
  ['a word without blocks', { do_remote_prefill: true }, true],
  ['our own promise', { ...promise, remote_block_ids: [[], []], kvtier: { tokens: 32 } }, false],
  ['what asks for prefill', { do_remote_decode: true, remote_engine_id: null, remote_host: 'd' }, false],
  ['nulls', { do_remote_prefill: false, remote_engine_id: null, remote_block_ids: null, transfer_id: null }, false],
  ['words of others', { kv_hint: {} }, false],
  ['nothing', {}, false],
  ['no object', 'x', false],
  ['null', null, false],
  ['a list', [1], false],
])('%s', (_, params, expected) => expect(isLoan(params)).toBe(expected));
