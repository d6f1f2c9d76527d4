/** Peers that are strangers, liars, silent or gone: refused and counted, never a wrong block, never a read that hangs. */
import { randomBytes } from 'node:crypto';
import { mkdirSync } from 'node:fs';
import { connect } from 'node:net';
import { join } from 'node:path';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { makeCertificates } from '../kit/testing/certificates.ts';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import type { PeerSecurity } from './control.ts';
import { PeerFrameReader } from './frames.ts';
import type { PeerTier } from './peer-tier.ts';
import { GivingNode, sharedSecret, until } from './testing/peer-pair.ts';
import { PeerRig } from './testing/peer-rig.ts';

const space = namespaceNamed('one');
const chain = Array.from({ length: 8 }, (_, i) => hashNamed(i));
const payloadBytes = 20_000;

describe('peers', () => {
  let rig: PeerRig;
  beforeEach(() => {
    rig = new PeerRig();
  });
  afterEach(() => rig.end());

  const give = (name: string, options: Parameters<PeerRig['give']>[0] = {}): Promise<GivingNode> =>
    rig.give(options, name, 2000);
  const all = (status: string): string[] => chain.map(() => status);

  it('deliver under TLS 1.3 with certificates of one authority', async () => {
    const security = makeCertificates(rig.bench.dir, '127.0.0.1');
    const node = await give('remote', { security });
    await node.bench.write(node.bench.tier, space, chain, payloadBytes);
    const { tier } = rig.fetchFrom([node.server.port], { security });
    await until('the index is there', () => tier.lookup(space, chain) === 8);
    await until('streams are up', () => tier.stats().detail!.usable_peers === 1);
    const statuses = await rig.bench.read(tier, space, chain, payloadBytes);
    expect(statuses).toEqual(all('ready'));
    expect(node.server.refusedCount).toBe(0);
  });

  it.each([
    ['another secret', { encryption: 'none', secrets: [Buffer.from('another')] }],
    ['plain text where TLS is spoken', 'tls'],
  ] as const)('are refused with %s', async (_, other) => {
    const security: PeerSecurity = other === 'tls' ? makeCertificates(rig.bench.dir, '127.0.0.1') : sharedSecret();
    const node = await give('remote', { security });
    await node.bench.write(node.bench.tier, space, chain, payloadBytes);
    const { tier } = rig.fetchFrom([node.server.port], { security: other === 'tls' ? sharedSecret() : other });
    await until('it was refused twice', () => node.server.counts.refused >= 2);
    expect(tier.lookup(space, chain)).toBe(0);
    expect(tier.stats()).toMatchObject({ inService: false });
    expect(tier.stats().outOfServiceReason).toContain(`127.0.0.1:${node.server.port}: `);
    expect(node.server.counts.peers).toBe(0);
  });

  it('are refused under TLS with a certificate of another authority', async () => {
    const node = await give('remote', { security: makeCertificates(rig.bench.dir, '127.0.0.1') });
    const { tier } = rig.fetchFrom([node.server.port], { security: makeCertificates(rig.bench.dir, '127.0.0.1') });
    await until('it was refused twice', () => tier.stats().outOfServiceReason.includes('certificate'));
    expect(node.server.counts.peers).toBe(0);
  });

  it('go on with renewed certificates, at both ends, as soon as they connect again', async () => {
    const made = ['old', 'new'].map((name) => {
      mkdirSync(join(rig.bench.dir, name));
      return makeCertificates(join(rig.bench.dir, name), '127.0.0.1') as Extract<PeerSecurity, { encryption: 'tls' }>;
    });
    const [old, fresh] = [made[0]!, made[1]!];
    let [given, fetched] = [old, old];
    let tell = (): void => {};
    const renewable = (now: () => typeof old, onRenewed = (_: () => void): void => {}): PeerSecurity => ({
      encryption: 'tls',
      get cert() {
        return now().cert;
      },
      get key() {
        return now().key;
      },
      get ca() {
        return now().ca;
      },
      onRenewed,
    });
    const security = renewable(
      () => given,
      (listener) => (tell = listener),
    );
    const node = await give('remote', { security });
    const connected = (tier: PeerTier): boolean => tier.stats().detail!.usable_peers === 1;
    const { tier } = rig.fetchFrom([node.server.port], { security: renewable(() => fetched) });
    await until('both have the old ones', () => connected(tier));
    given = fresh;
    tell();
    const { tier: late } = rig.fetchFrom([node.server.port], { security: renewable(() => fetched) });
    await until('the old one is of no use any more', () => late.stats().outOfServiceReason.includes('certificate'));
    expect(connected(tier)).toBe(true); // whose connection stands
    fetched = fresh;
    await until('the new one is shown', () => connected(late));
  });

  it('that send garbage, or nothing, are closed and counted; others are served meanwhile', async () => {
    const node = await give('remote');
    await node.bench.write(node.bench.tier, space, chain, payloadBytes);
    const { tier } = rig.fetchFrom([node.server.port]);
    const openings = [
      Buffer.from('KVTPDATA'),
      Buffer.from('GET / HTTP/1.1\r\n\r\n'),
      Buffer.alloc(0),
      randomBytes(200_000),
    ];
    for (const port of [node.server.port, node.server.dataPort]) {
      await Promise.all(
        openings.map(
          (bytes) =>
            new Promise<void>((resolve) => {
              const socket = connect({ host: '127.0.0.1', port });
              socket.on('error', () => {});
              socket.on('close', () => resolve());
              socket.resume();
              socket.write(bytes);
            }),
        ),
      );
    }
    // The loop tells of an end after it has closed the socket.
    await until('all were counted', () => node.server.refusedCount >= 2 * openings.length);
    await until('the index is there', () => tier.lookup(space, chain) === 8 && tier.stats().detail!.usable_peers === 1);
    expect(await rig.bench.read(tier, space, chain, payloadBytes)).toEqual(all('ready'));
  });

  it('have link-local addresses, with the interface that they are meant on', async () => {
    const { loops } = rig.fetchFrom([]);
    const down = (host: string): Promise<string> =>
      new Promise((resolve) => {
        loops.connect(host, 9, Buffer.alloc(16), Buffer.alloc(32), { onUp: () => resolve('up'), onDown: resolve });
      });
    // An address that nobody has: a connection that ends, and no error.
    expect(await down('fe80::1234%lo')).toBe('ended');
    await expect(down('fe80::1234%nowhere')).rejects.toThrow('CONFIG: fe80::1234%nowhere: not an IP address');
  });

  it('whose block is corrupt: never delivered, and its owner removes it', async () => {
    const node = await give('remote');
    await node.bench.write(node.bench.tier, space, chain, payloadBytes);
    const { tier } = rig.fetchFrom([node.server.port]);
    await until('the index is there', () => tier.lookup(space, chain) === 8);
    node.bench.flip(node.bench.tier.get(space, chain[3]!)!.slot + 5000);
    await until('streams are up', () => tier.stats().detail!.usable_peers === 1);
    const statuses = await rig.bench.read(tier, space, chain, payloadBytes);
    expect(statuses.filter((status) => status === 'ready').length).toBe(7);
    expect(statuses[3]).toBe('corrupt');
    await until('the owner removed it', () => node.server.counts.corrupt === 1);
    expect(tier.lookup(space, chain)).toBe(3);
    expect(tier.stats().corrupt).toBe(1);
  });

  it('that go: their blocks go at once; another holder delivers; they are listed again when they are back', async () => {
    const [first, second] = [await give('first'), await give('second')];
    await first.bench.write(first.bench.tier, space, chain, payloadBytes);
    await second.bench.write(second.bench.tier, space, chain.slice(0, 4), payloadBytes);
    const { tier } = rig.fetchFrom([first.server.port, second.server.port]);
    const port = first.server.port;
    await until('both are there', () => tier.stats().detail!.connected_peers === 2 && tier.lookup(space, chain) === 8);
    await first.server.close();
    await first.loops.close();
    await until('its blocks are gone', () => tier.lookup(space, chain) === 4);
    await until('the other one delivers', () => tier.stats().detail!.usable_peers === 1);
    expect(await rig.bench.read(tier, space, chain, payloadBytes)).toEqual([
      ...Array(4).fill('ready'),
      ...Array(4).fill('missing'),
    ]);
    const again = await GivingNode.open(first.bench, { port });
    rig.onEnd(() => again.close());
    await until('it is listed again', () => tier.lookup(space, chain) === 8);
    await until('streams are up', () => tier.stats().detail!.usable_peers === 2);
    const statuses = await rig.bench.read(tier, space, chain, payloadBytes);
    expect(statuses).toEqual(all('ready'));
  });

  it('that are not there yet are no warning until it lasts; that a connection is lost is one, each time', async () => {
    const lines: string[] = [];
    const log = {
      info: (_: object, line: string) => lines.push(`info: ${line}`),
      warn: (_: object, line: string) => lines.push(`warn: ${line}`),
      error: (_: object, line: string) => lines.push(`error: ${line}`),
    };
    const first = await give('first');
    const { port } = first.server;
    await first.close();
    const { tier } = rig.fetchFrom([port], { log, joinMs: 800 });
    await until('it has lasted', () => lines.some((line) => line.startsWith('warn')));
    for (let round = 0; round < 2; round++) {
      const again = await GivingNode.open(first.bench, { port });
      rig.onEnd(() => again.close());
      await until('it is there', () => tier.stats().detail!.connected_peers === 1);
      await again.close();
      await until('it is gone', () => tier.stats().detail!.connected_peers === 0);
    }
    const lost = ['info: connected to a peer', 'warn: a peer is not connected'];
    expect(lines.filter((line, i) => line !== lines[i - 1])).toEqual([
      ...['info: a peer is not connected yet', 'warn: a peer has never been connected', ...lost, ...lost],
    ]);
  });

  it('speak in frames: any bytes, cut anywhere, are messages or a KvError', () => {
    const bytes = fc.oneof(
      fc.uint8Array({ maxLength: 400 }),
      fc.tuple(fc.nat(12), fc.uint8Array({ maxLength: 200 })).map(([kind, body]) => {
        const head = Buffer.alloc(5);
        head.writeUInt32LE(body.length + 1, 0);
        head[4] = kind;
        return Buffer.concat([head, body]);
      }),
    );
    fc.assert(
      fc.property(fc.array(bytes, { maxLength: 5 }), fc.integer({ min: 1, max: 50 }), (parts, cut) => {
        const stream = Buffer.concat(parts);
        const reader = new PeerFrameReader();
        try {
          for (let at = 0; at < stream.length; at += cut) for (const _ of reader.push(stream.subarray(at, at + cut)));
        } catch (error) {
          expect(error).toMatchObject({ name: 'KvError', code: 'PROTOCOL' });
        }
      }),
      { numRuns: 2000 },
    );
  });
});
