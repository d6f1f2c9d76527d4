import { expect, it } from 'vitest';
import { endpointPickerSchema, parseConfig } from './index.ts';

const parse = (value: unknown) => parseConfig(endpointPickerSchema, value, 'file');
const tls = { certFile: 'c', keyFile: 'k' };

it('listens on loopback at the protocol’s ports', () => {
  expect(parse({})).toMatchObject({
    host: '127.0.0.1',
    port: 9002,
    health: { host: '127.0.0.1', port: 9003 },
    tls: null,
    bodyMode: 'fullDuplex',
    fallbacks: 0,
  });
  expect(parse({ health: null }).health).toBeNull();
});

it('beyond loopback only with TLS and certificates of gateways, or by a word that the network is trusted', () => {
  const host = '0.0.0.0';
  expect(() => parse({ host })).toThrow(/^file: tls: 0\.0\.0\.0 is not loopback: name certFile and keyFile/);
  expect(() => parse({ host, trustedNetwork: true })).toThrow(/^file: tls: /);
  expect(() => parse({ host, tls })).toThrow(/^file: tls\.clientCaFile: .* or say "trustedNetwork": true/);
  expect(parse({ host, tls, trustedNetwork: true }).tls).toEqual({ ...tls, clientCaFile: null, reloadMs: 10_000 });
  expect(parse({ host: '::', tls: { ...tls, clientCaFile: 'a' } }).host).toBe('::');
  expect(() => parse({ health: { host } })).toThrow(/^file: health: 0\.0\.0\.0 is not loopback/);
  expect(parse({ health: { host, trustedNetwork: true } }).health?.host).toBe(host);
});

it.each([
  [{ host: 'localhost' }, /host: an IP address/],
  [{ port: 70_000 }, /port/],
  [{ fallbacks: 8 }, /fallbacks/],
  [{ bodyMode: 'streamed' }, /bodyMode/],
  [{ maxStreams: 0 }, /maxStreams/],
  [{ colour: 1 }, /colour/],
])('%j is refused', (value, why) => expect(() => parse(value)).toThrow(why));
