/** What is read of a gateway's words, and which endpoints there are. */

import { endpointOf, ipEndpointOf } from '@kvtier/pod-handoff';
import { describe, expect, it } from 'vitest';
import { askedOf, servedOf } from './asked.ts';
import { candidatesOf } from './endpoints.ts';
import { pod } from './testing/index.ts';

const headers = (values: readonly (readonly [string, string])[]) => ({
  headers: { headers: values.map(([key, value]) => ({ key, value, rawValue: Buffer.alloc(0) })) },
  endOfStream: false,
});

describe('headers', () => {
  it('the first value counts, a long one is clipped, an id that is none is replaced', () => {
    const asked = askedOf(
      headers([
        [':method', 'POST'],
        [':method', 'GET'],
        [':path', `/v1/x?${'q'.repeat(100)}`],
        ['x-request-id', 'a b'],
        ['x-session-token', 't'.repeat(1_000)],
        ['x-claude-code-session-id', 'later'],
      ]),
      undefined,
    );
    expect(asked).toMatchObject({ method: 'POST', path: '/v1/x', model: undefined, subset: undefined });
    expect(asked.session).toBe('t'.repeat(512));
    expect(asked.id).toMatch(/^[0-9a-f-]{36}$/);
    expect(askedOf({ headers: undefined, endOfStream: true }, undefined)).toMatchObject({ path: '', session: '' });
  });

  it.each([['x-session-id'], ['x-session-token'], ['x-session-affinity'], ['x-claude-code-session-id']])(
    '%s names the session',
    (name) => {
      expect(askedOf(headers([[name, 's']]), undefined).session).toBe('s');
    },
  );
});

describe('metadata', () => {
  it('names of prototypes name nothing', () => {
    expect(askedOf(headers([]), { filterMetadata: {} }).subset).toBeUndefined();
    const foreign = JSON.parse('{"__proto__": {"envoy.lb.subset_hint": 1}, "envoy.lb": {"x": 1}}') as never;
    expect(askedOf(headers([]), { filterMetadata: foreign }).subset).toBeUndefined();
    expect(servedOf({ filterMetadata: foreign })).toBeUndefined();
    expect(
      servedOf({ filterMetadata: { 'envoy.lb': { 'x-gateway-destination-endpoint-served': 7 } } }),
    ).toBeUndefined();
  });

  it('a subset of very many endpoints is cut', () => {
    const many = Array.from({ length: 20_000 }, (_, at) => `10.0.0.1:${at}`);
    for (const value of [many, many.join(',')]) {
      const metadata = { 'envoy.lb.subset_hint': { 'x-gateway-destination-endpoint-subset': value } };
      expect(askedOf(headers([]), { filterMetadata: metadata }).subset?.length).toBe(16_384);
    }
  });
});

describe('endpoints', () => {
  it.each([
    ['http://10.0.0.1:8000', '10.0.0.1:8000'],
    ['http://10.0.0.1', '10.0.0.1:80'],
    ['https://10.0.0.1/', '10.0.0.1:443'],
    ['http://[FD00::3]:8000/v1', '[fd00::3]:8000'],
    ['unix:/run/x.sock', undefined],
    ['10.0.0.1:8000', undefined],
    ['', undefined],
  ])('%s is %s', (address, endpoint) => {
    expect(endpointOf(pod(0, address).record)).toBe(endpoint);
  });

  it.each([
    ['http://10.0.0.1:8000', '10.0.0.1:8000'],
    ['http://[FD00::3]:8000/v1', '[fd00::3]:8000'],
    ['http://vllm-b:8000', undefined],
    ['http://localhost:8000', undefined],
    ['http://10.0.0.1.nip.io', undefined],
    ['unix:/run/x.sock', undefined],
  ])('of %s a gateway is named %s', (address, endpoint) => {
    const { record } = pod(0, address);
    expect(ipEndpointOf(record)).toBe(endpoint);
    const candidates = candidatesOf([pod(0, address), pod(1, 'http://10.0.0.9:1')], undefined);
    expect(candidates.map((one) => one.endpoint)).toEqual([...(endpoint ? [endpoint] : []), '10.0.0.9:1']);
  });

  it('our own workers and refused ones are no candidates; silent ones are Dispatch’s to leave out', () => {
    const own = pod(0, 'http://10.0.0.1:1');
    const workers = [
      { ...own, record: { ...own.record, kind: 'kvtier' as const } },
      pod(1, 'http://10.0.0.2:1', { state: 'refused' }),
      pod(2, 'http://10.0.0.3:1', { state: 'silent' }),
      undefined,
    ];
    expect(candidatesOf(workers, undefined).map(({ endpoint }) => endpoint)).toEqual(['10.0.0.3:1']);
  });
});
