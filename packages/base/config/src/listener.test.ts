/** What may listen beyond loopback, and with what: the API server, and the listener of probes and scrapes. */
import { expect, it } from 'vitest';
import { cacheNodeSchema, coordinatorSchema, isLoopback, parseConfig } from './index.ts';

const parse = (value: object) => parseConfig(coordinatorSchema, { port: 0, engine: 'unix:/e', ...value }, 'file');
const tls = { certFile: 'c', keyFile: 'k' };
const host = '0.0.0.0';

it.each<[object, RegExp]>([
  [{ host }, /^file: tls: 0\.0\.0\.0 is not loopback: name certFile and keyFile, or say "trustedNetwork": true; /],
  [{ host, apiKeysFile: 'a' }, /^file: tls: 0\.0\.0\.0 is not loopback/],
  [
    { host: '10.0.0.1', tls },
    /^file: tls\.clientCaFile: 10\.0\.0\.1 is not loopback: name the clients' authority or an apiKeysFile, or /,
  ],
  [{ host: '::', tls, adminKeysFile: 'a' }, /^file: tls\.clientCaFile: :: is not loopback/],
  [{ host: 'kvtier.example' }, /^file: host: an IP address, or localhost/],
  [{ operations: { host } }, /^file: operations\.tls: 0\.0\.0\.0 is not loopback/],
  [{ operations: { host, tls } }, /^file: operations\.tls\.clientCaFile: .*: name the scrapers' authority, or say/],
  [{ trustedNetwork: true, operations: { host } }, /^file: operations\.tls: /],
])('%j is refused', (value, why) => expect(() => parse(value)).toThrow(why));

it.each([
  { host: '127.0.0.2' },
  { host: 'localhost', apiKeysFile: 'a' },
  { host, tls, apiKeysFile: 'a' },
  { host, tls: { ...tls, clientCaFile: 'ca' } },
  { host, trustedNetwork: true },
  { host: '::', trustedNetwork: true, apiKeysFile: 'a' },
  { operations: {} },
  { operations: { host, tls: { ...tls, clientCaFile: 'ca' } } },
  { operations: { host, trustedNetwork: true } },
])('%j is taken', (value) => expect(parse(value)).toMatchObject(value));

it('loopback has many names', () => {
  const local = ['127.0.0.1', '127.1.2.3', '::1', 'localhost', '::ffff:127.0.0.1'];
  const far = ['0.0.0.0', '::', '10.127.0.1', '128.0.0.1', '127.evil.example', '::ffff:10.0.0.1'];
  expect([local.filter((one) => !isLoopback(one)), far.filter(isLoopback)]).toEqual([[], []]);
});

it('a cache node’s listener has the same rules, and a port of its own', () => {
  const node = { socketPath: '/s', dataDir: '/d', arena: { bytes: 1 << 20 }, disk: null };
  const of = (operations: object) => parseConfig(cacheNodeSchema, { ...node, operations }, 'file').operations;
  expect(of({})).toEqual({ host: '127.0.0.1', port: 9006, tls: null, trustedNetwork: false });
  for (const taken of [
    { host, trustedNetwork: true },
    { host, tls: { ...tls, clientCaFile: 'ca' } },
    { host: '::1' },
    { port: 0 },
  ])
    expect(of(taken)).toMatchObject(taken);
  expect(() => of({ host })).toThrow(/^file: operations\.tls: 0\.0\.0\.0 is not loopback/);
  expect(() => of({ host, tls })).toThrow(/^file: operations\.tls\.clientCaFile: .*: name the scrapers' authority/);
  expect(() => of({ colour: 1 })).toThrow(/^file: operations: .*colour/);
  expect(() => of({ port: 70_000 })).toThrow(/^file: operations\.port: /);
});
