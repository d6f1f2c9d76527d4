/** Records of members of other versions. */
import { expect, it } from 'vitest';
import { parseRecord } from './record.ts';

const parse = (id: string, record: object) => parseRecord({ id, text: JSON.stringify(record) });
const events = { endpoint: 'tcp://10.0.0.1:1', replayEndpoint: null, topic: '' };
const worker = {
  ...{ name: 'a', kind: 'kvtier', address: '10.0.0.1:1', role: 'both', draining: false, node: null, revision: '' },
  events,
};

it('what is not said is as it was before it could be', () => {
  expect(parse('worker:a', { name: 'a', address: '10.0.0.1:1' })).toEqual({
    parsed: { worker: { ...worker, events: null } },
  });
  expect(parse('node:n', { name: 'n' })).toEqual({ parsed: { node: { name: 'n', peer: null, events: null } } });
});

it('what only newer members know is left out, wherever it stands', () => {
  const more = { ...worker, colour: 'red', events: { ...events, codec: 9 } };
  expect(parse('worker:a', more)).toEqual({ parsed: { worker } });
  const node = { name: 'n', peer: { host: '10.0.0.1', port: 7 }, events };
  const newer = { ...node, peer: { ...node.peer, via: 'rdma' }, events: { ...events, codec: 9 }, colour: 'red' };
  expect(parse('node:n', newer)).toEqual({ parsed: { node } });
});

it('a node may say which nodes it fetches from', () => {
  const node = { name: 'n', peer: { host: '10.0.0.1', port: 7 }, events, peers: ['a', 'b'] };
  expect(parse('node:n', node)).toEqual({ parsed: { node } });
  expect(parse('node:n', { ...node, peers: Array(65).fill('a') }).why).toMatch(/^peers: /);
  expect(parse('node:n', { ...node, peers: [''] }).why).toMatch(/^peers\.0: /);
});

it('a node may say whether prompts are computed beside it', () => {
  const node = { name: 'n', peer: { host: '10.0.0.1', port: 7 }, events, role: 'prefill' };
  expect(parse('node:n', node)).toEqual({ parsed: { node } });
  expect(parse('node:n', { ...node, role: 'cook' }).why).toMatch(/^role: /);
});

it('what is known and cannot be makes it none', () => {
  expect(parse('worker:a', { ...worker, kind: 'other' }).why).toMatch(/^kind: /);
  expect(parse('worker:a', { ...worker, events: { ...events, endpoint: 7 } }).why).toMatch(/^events\.endpoint: /);
  expect(parse('worker:b', worker).why).toBe('its name is another one');
});
