import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { existsSync, mkdirSync, rmSync, statSync, writeFileSync } from 'node:fs';
import net from 'node:net';
import path from 'node:path';
import { namespaceFromDigest, unpackHashKeys } from '@kvtier/identity';
import { Bench, settled, silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { ReserveStatus, writeFrame } from '@kvtier/wire';
import fc from 'fast-check';
import { afterEach, beforeEach, describe, expect, it, onTestFinished, vi } from 'vitest';
import { SessionServer } from './server.ts';
import { attachOf, packed, type RawClient } from './testing/raw-client.ts';
import { headerBytes, put, ServedBench } from './testing/served-bench.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

let rig: ServedBench;

const lookup = (client: RawClient, name: string, count: number) =>
  client.call({ $case: 'lookup', value: { hashes: packed(name, count) } }, 'lookup');

beforeEach(() => {
  rig = new ServedBench();
});
afterEach(() => rig.close());

describe('the socket', () => {
  it('is mode 0600 in a folder 0700, and gone after close', async () => {
    await rig.start();
    expect(statSync(rig.socketPath).mode & 0o777).toBe(0o600);
    expect(statSync(path.dirname(rig.socketPath)).mode & 0o777).toBe(0o700);
    await rig.server!.close();
    expect(existsSync(rig.socketPath)).toBe(false);
  });

  it('of a dead process is replaced; one that is served, or is no socket, is refused', async () => {
    mkdirSync(path.dirname(rig.socketPath));
    const script = `require('net').createServer().listen(${JSON.stringify(rig.socketPath)}, () => process.kill(process.pid, 'SIGKILL'))`;
    await once(spawn(process.execPath, ['-e', script]), 'exit');
    expect(existsSync(rig.socketPath)).toBe(true);
    await rig.start();
    const first = rig.server!;
    await expect(rig.start()).rejects.toMatchObject({ code: 'LOCKED' });
    expect((await rig.attached()).id.length).toBe(16);
    await first.close();
    writeFileSync(rig.socketPath, 'precious');
    await expect(rig.start()).rejects.toMatchObject({ code: 'SETUP' });
    expect(statSync(rig.socketPath).size).toBe(8);
    rmSync(rig.socketPath);
    rig.socketPath = path.join(rig.folder, 'x'.repeat(120));
    await expect(rig.start()).rejects.toMatchObject({ code: 'CONFIG' });
  });
});

describe('attach', () => {
  it('says where the arena is, and every answer carries the boot epoch', async () => {
    await rig.start();
    const client = await rig.connect();
    const id = client.send({ $case: 'attach', value: attachOf() });
    while (client.answers.length === 0) await settled();
    expect(client.answers[0]).toEqual({
      id,
      bootEpoch: 0xfedc_ba98_7654_3210n,
      body: {
        $case: 'attached',
        value: {
          session: expect.any(Buffer),
          arenaPath: '/dev/shm/none',
          arenaBytes: 1n << 20n,
          headerBytes,
          endsPins: true,
          arenaId: 99n,
        },
      },
    });
  });

  it.each([
    ['another protocol', { protocol: 2 }, 'PROTOCOL'],
    ['a short namespace', { namespace: Buffer.alloc(31) }, 'PROTOCOL'],
    ['an odd hash size', { hashBytes: 20 }, 'PROTOCOL'],
    ['no payload', { payloadBytes: 0n }, 'PROTOCOL'],
    ['a block that does not fit', { payloadBytes: 1001n }, 'CAPACITY'],
    ['no tokens', { blockTokens: 0 }, 'PROTOCOL'],
    ['a broken previous session', { previousSession: Buffer.alloc(3) }, 'PROTOCOL'],
  ])('%s is refused and the connection ends', async (_what, changes, code) => {
    await rig.start();
    const client = await rig.connect();
    await expect(client.attach(changes)).rejects.toMatchObject({ code });
    await client.ended;
  });

  it('it comes first, once, and in time', async () => {
    await rig.start();
    const early = await rig.connect();
    await expect(lookup(early, 'x', 1)).rejects.toMatchObject({ code: 'PROTOCOL' });
    const twice = await rig.attached();
    await expect(twice.attach()).rejects.toMatchObject({ code: 'PROTOCOL' });
    const impatient = new ServedBench();
    onTestFinished(() => impatient.close());
    await impatient.start({ attachDeadlineMs: 100 });
    await (await impatient.connect()).ended;
  });

  it('a connection that the kernel cannot hand over costs nobody else anything', async () => {
    const listening = vi.spyOn(net, 'createServer');
    await rig.start();
    const client = await rig.attached();
    listening.mock.results[0]!.value.emit('error', new Error('accept EMFILE'));
    expect(rig.bench.store.counters.get('session.refused.accept')).toBe(1);
    await put(client, 'x', 1);
    await rig.attached();
    listening.mockRestore();
  });

  it('sessions are bounded; processes of other users are not let in', async () => {
    await rig.start({ maxSessions: 1 });
    const client = await rig.attached();
    await (await rig.connect()).ended;
    await client.end();
    await vi.waitUntil(() => rig.server!.sessions === 0, patience);
    expect((await rig.attached()).id.length).toBe(16);
    expect(rig.bench.store.counters.get('session.refused.too_many')).toBe(1);
    await rig.server!.close();
    rig.bench = new Bench(4);
    rig.server = await SessionServer.listen({
      ...{
        socketPath: rig.socketPath,
        store: rig.bench.store,
        arenaPath: '',
        arenaBytes: 1 << 20,
        maxPayloadBytes: 1000,
        arenaId: 0n,
        headerBytes,
        bootEpoch: 1n,
      },
      ...{ clock: systemClock, log: silent, peerCredentials: () => ({ pid: 1, uid: 4711 }) },
    });
    await (await rig.connect()).ended;
    expect(rig.bench.store.counters.get('session.refused.uid')).toBe(1);
  });
});

describe('requests', () => {
  it('reserve, commit, lookup, load, release, stats: the whole life of a chain', async () => {
    await rig.start();
    const client = await rig.attached();
    const { status, offsets } = await client.call(
      { $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('x', 8) } },
      'reserved',
    );
    const { RESERVE_STATUS_RESERVED: reserved, RESERVE_STATUS_REFUSED: refused } = ReserveStatus;
    expect(status).toEqual([...Array(6).fill(reserved), refused, refused]);
    expect(offsets.slice(6)).toEqual([0n, 0n]);
    expect(new Set(offsets.slice(0, 6).map(Number)).size).toBe(6);
    expect(Math.min(...offsets.slice(0, 6).map(Number))).toBeGreaterThan(headerBytes);
    const checksums = [11n, 12n, 0xffff_ffff_ffff_ffffn];
    expect(await client.call({ $case: 'commit', value: { offsets: offsets.slice(0, 3), checksums } }, 'done')).toEqual({
      count: 3,
    });
    expect(await client.call({ $case: 'abort', value: { offsets: offsets.slice(3, 6) } }, 'done')).toEqual({
      count: 3,
    });
    expect(await lookup(client, 'x', 8)).toEqual({ held: 3, spans: [{ tier: 'arena', count: 3 }], estimatedUs: 0 });
    const load = client.send({ $case: 'load', value: { hashes: packed('x', 8), deadlineMs: 1000 } });
    expect(await client.answer(load, 'ready')).toEqual({
      first: 0,
      offsets: offsets.slice(0, 3),
      checksums,
      tier: 'arena',
    });
    expect(await client.answer(load, 'loadDone')).toEqual({ loaded: 3, reason: 'missing' });
    expect(await client.call({ $case: 'release', value: { loadId: load, corrupt: [2] } }, 'done')).toEqual({
      count: 1,
    });
    expect(await client.call({ $case: 'release', value: { loadId: load, corrupt: [] } }, 'done')).toEqual({ count: 0 });
    expect((await lookup(client, 'x', 8)).held).toBe(2);
    expect(await client.call({ $case: 'pin', value: { hashes: packed('x', 1), ttlMs: 1000 } }, 'done')).toEqual({
      count: 1,
    });
    expect(await client.call({ $case: 'unpin', value: { hashes: packed('x', 2) } }, 'done')).toEqual({ count: 1 });
    const stats = await client.call({ $case: 'stats', value: {} }, 'stats');
    expect(stats.tiers.map(({ tier, inService }) => [tier, inService])).toEqual([
      ['arena', true],
      ['disk', true],
    ]);
    expect(stats.counters).toMatchObject({ 'commit.blocks': 3n, 'release.corrupt': 1n, 'session.open': 1n });
  });

  it('a block that an engine found wrong is not "held" for who would store it again at once', async () => {
    await rig.start({}, 8, { plans: { disk: { write: 'none' } } });
    const client = await rig.attached();
    await put(client, 'x', 3);
    const load = client.send({ $case: 'load', value: { hashes: packed('x', 3), deadlineMs: 1000 } });
    await client.answer(load, 'loadDone');
    client.socket.cork(); // both are read in one turn: the block is still being looked at
    client.send({ $case: 'release', value: { loadId: load, corrupt: [1] } });
    const reserve = client.send({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('x', 3) } });
    client.socket.uncork();
    const { RESERVE_STATUS_RESERVED: reserved, RESERVE_STATUS_HELD: held } = ReserveStatus;
    expect((await client.answer(reserve, 'reserved')).status).toEqual([held, reserved, held]);
  });

  it('prefetch brings blocks into the arena, is refused with a reason, and can be cancelled', async () => {
    await rig.start({}, 24);
    const client = await rig.attached();
    rig.bench.disk.put(namespaceFromDigest(Buffer.alloc(32, 7)), unpackHashKeys(packed('x', 3), 16));
    const prefetch = client.send({ $case: 'prefetch', value: { hashes: packed('x', 3) } });
    expect(await client.answer(prefetch, 'prefetching')).toEqual({ accepted: true, reason: '' });
    while (rig.bench.answer('read', 'ready')) await settled();
    expect((await lookup(client, 'x', 3)).spans).toEqual([{ tier: 'arena', count: 3 }]);
    const cancel = { $case: 'cancelPrefetch' as const, value: { prefetchId: prefetch } };
    expect((await client.call(cancel, 'done')).count).toBe(0);
  });

  it('a tenant has its quota, and a session its time to live; stats say what each tier refused, and why', async () => {
    await rig.start({}, 8, { quotas: { small: { arena: 2 } }, plans: { disk: { write: 'selective' } } });
    const client = await rig.connect();
    await client.attach({ tenant: 'small', ttlSeconds: 60 });
    const reserve = { parent: Buffer.alloc(0), hashes: packed('x', 3) };
    const { status, reason, offsets } = await client.call({ $case: 'reserve', value: reserve }, 'reserved');
    expect([status.filter((one) => one === ReserveStatus.RESERVE_STATUS_REFUSED).length, reason]).toEqual([1, 'quota']);
    const written = offsets.filter((offset) => offset !== 0n);
    await client.call({ $case: 'commit', value: { offsets: written, checksums: written.map(() => 0n) } }, 'done');
    const { tiers } = await client.call({ $case: 'stats', value: {} }, 'stats');
    expect(tiers[1]).toMatchObject({ breaker: 'closed', breakerReason: '', refusals: { admission: 2n } });
    expect(tiers[1]!.detail.write_pending_bytes).toBe(0);
    expect((await lookup(client, 'x', 3)).held).toBe(2);
    rig.bench.clock.advance(60_000);
    expect((await lookup(client, 'x', 3)).held).toBe(0);
  });

  it('a list of numbers without a bound ends this session, and takes no time from the others', async () => {
    await rig.start({ maxHashes: 100 });
    const [good, bad] = [await rig.attached(), await rig.attached()];
    await put(good, 'x', 2);
    const corrupt = new Array<number>(101).fill(0);
    const release = { $case: 'release' as const, value: { loadId: 1n, corrupt } };
    await expect(bad.call(release, 'done')).rejects.toThrow('the connection ended');
    await bad.ended;
    expect(bad.answers.map(({ body }) => body.value)).toEqual([expect.objectContaining({ code: 'PROTOCOL' })]);
    expect((await lookup(good, 'x', 2)).held).toBe(2);
  });

  it('the names of a namespace are of one length, also when nobody has it open', async () => {
    await rig.start();
    const first = await rig.attached();
    await put(first, 'x', 2);
    const second = await rig.connect();
    await expect(second.attach({ hashBytes: 32 })).rejects.toMatchObject({
      code: 'PROTOCOL',
      message: expect.stringMatching(/hashes of 16 bytes, not 32/),
    });
    await first.end();
    const third = await rig.connect();
    await expect(third.attach({ hashBytes: 32 })).rejects.toMatchObject({ code: 'PROTOCOL' });
    await (await rig.connect()).attach({ hashBytes: 32, namespace: Buffer.alloc(32, 8) });
  });

  it('a load that nothing holds is done at once, and leases nothing', async () => {
    await rig.start();
    const client = await rig.attached();
    const load = client.send({ $case: 'load', value: { hashes: packed('x', 4), deadlineMs: 1000 } });
    expect(await client.answer(load, 'loadDone')).toEqual({ loaded: 0, reason: 'missing' });
    expect(await client.call({ $case: 'release', value: { loadId: load, corrupt: [] } }, 'done')).toEqual({ count: 0 });
  });

  it.each([
    ['half a hash', { $case: 'lookup', value: { hashes: Buffer.alloc(17) } }],
    ['too many hashes', { $case: 'lookup', value: { hashes: Buffer.alloc(16 * 101) } }],
    ['a foreign slot', { $case: 'commit', value: { offsets: [4096n], checksums: [1n] } }],
    ['fewer checksums than offsets', { $case: 'commit', value: { offsets: [4096n], checksums: [] } }],
    ['an abort of nothing', { $case: 'abort', value: { offsets: [1n << 63n] } }],
    ['a long parent', { $case: 'reserve', value: { parent: Buffer.alloc(32), hashes: Buffer.alloc(16) } }],
  ] as const)('%s ends this session and no other', async (_what, request) => {
    await rig.start({ maxHashes: 100 });
    const [good, bad] = [await rig.attached(), await rig.attached()];
    await put(good, 'x', 2);
    await expect(bad.call(request as never, 'done')).rejects.toMatchObject({ code: 'PROTOCOL' });
    await bad.ended;
    expect((await lookup(good, 'x', 2)).held).toBe(2);
  });

  it('bytes that are no frame end this session and no other', async () => {
    await rig.start();
    const good = await rig.attached();
    await put(good, 'x', 2);
    await fc.assert(
      fc.asyncProperty(fc.uint8Array({ minLength: 1, maxLength: 64 }), fc.boolean(), async (noise, framed) => {
        const bad = await rig.connect();
        if (framed) writeFrame(bad.socket, noise);
        else bad.socket.write(noise);
        bad.socket.end();
        await bad.ended;
        expect((await lookup(good, 'x', 2)).held).toBe(2);
      }),
      { numRuns: 100 },
    );
    await vi.waitUntil(() => rig.server!.sessions === 1, patience);
  });

  it.each([
    ['no frame', Buffer.alloc(64, 0xff)],
    ['frames that are no messages', Buffer.from([1, 0, 0, 0, 0xff, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff])],
  ])('one that goes on sending %s is ended all the same, and counts once', async (_what, noise) => {
    const goodbyeMs = 100;
    await rig.start({ goodbyeMs });
    const deaf = net.connect({ path: rig.socketPath, allowHalfOpen: true }).resume();
    deaf.on('error', () => {}); // it writes until it is cut off
    const closed = new Promise((resolve) => deaf.once('close', resolve));
    const writes = setInterval(() => deaf.write(noise), goodbyeMs / 10);
    onTestFinished(() => {
      clearInterval(writes);
      deaf.destroy();
    });
    const began = performance.now();
    await closed;
    clearInterval(writes);
    expect(performance.now() - began).toBeGreaterThan(goodbyeMs / 2); // it had its time to read why
    expect(rig.bench.store.counters.get('session.failed.PROTOCOL')).toBe(1);
    await vi.waitUntil(() => rig.server!.sessions === 0, patience);
  });
});

describe('slow and stopped engines', () => {
  it('one that never reads its answers does not disturb the others, and costs bounded memory', async () => {
    // Also of one chunk no more requests are answered than the pause allows.
    await rig.start({ pauseBytes: 64 << 10, maxPendingBytes: 256 << 10 });
    const [good, deaf] = [await rig.attached(), await rig.attached()];
    deaf.socket.pause();
    const asked = 20_000;
    for (let sent = 0; sent < asked; sent++) deaf.send({ $case: 'stats', value: {} });
    await put(good, 'x', 2);
    expect((await lookup(good, 'x', 2)).held).toBe(2);
    deaf.socket.resume();
    for (let id = 2n; id < 100n; id++) await deaf.answer(id, 'stats');
    expect(rig.server!.sessions).toBe(2);
  });

  it('one that asks much at once is answered in many turns, in the order in which it asked', async () => {
    await rig.start({ framesPerTurn: 50 });
    const client = await rig.attached();
    const inTurns: number[] = [];
    let turnEnds: NodeJS.Immediate | undefined;
    rig.gauges = () => {
      turnEnds ??= setImmediate(() => {
        turnEnds = undefined;
      });
      if (turnEnds !== lastTurn) inTurns.push(0);
      lastTurn = turnEnds;
      inTurns[inTurns.length - 1]!++;
      return { answered: ++answered };
    };
    let lastTurn: NodeJS.Immediate | undefined;
    let answered = 0;
    const asked = 3_000;
    client.socket.cork(); // so that they arrive in few chunks
    const first = client.send({ $case: 'stats', value: {} });
    for (let sent = 1; sent < asked; sent++) client.send({ $case: 'stats', value: {} });
    client.socket.uncork();
    await vi.waitUntil(() => client.answers.length === asked, patience);
    expect(client.answers.map(({ id }) => Number(id - first))).toEqual(Array.from({ length: asked }, (_, i) => i));
    expect(inTurns.reduce((sum, count) => sum + count)).toBe(asked);
    expect(Math.max(...inTurns)).toBe(50);
  });
});

describe('when a connection ends', () => {
  it('a session without slots leaves nothing', async () => {
    await rig.start();
    const client = await rig.attached();
    await put(client, 'x', 2);
    await client.end();
    await vi.waitUntil(() => rig.server!.sessions === 0, patience);
    expect(rig.server!.quarantined).toBe(0);
  });

  it('slots in use stay taken while the process lives, until its next session names the old one', async () => {
    await rig.start();
    const client = await rig.attached();
    await put(client, 'x', 2);
    while (rig.bench.answer('write', 'stored')) await settled();
    client.send({ $case: 'load', value: { hashes: packed('x', 2), deadlineMs: 1000 } });
    await client.call({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('y', 3) } }, 'reserved');
    await client.end();
    await vi.waitUntil(() => rig.server!.quarantined === 1, patience);
    expect(rig.bench.arena.busySlots).toBe(5);
    const other = await rig.attached(Buffer.alloc(16, 1));
    expect(rig.bench.arena.busySlots).toBe(5);
    await rig.attached(client.id);
    expect(rig.bench.arena.busySlots).toBe(0);
    expect(rig.server!.quarantined).toBe(0);
    expect((await lookup(other, 'x', 2)).held).toBe(2);
    expect((await lookup(other, 'y', 3)).held).toBe(0);
  });

  it('a session may also be named while its connection is still open', async () => {
    await rig.start();
    const client = await rig.attached();
    await client.call({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('y', 3) } }, 'reserved');
    await rig.attached(client.id);
    await client.ended;
    expect(rig.bench.arena.busySlots).toBe(0);
    expect(rig.server!.quarantined).toBe(0);
  });

  it('because the server closes, slots stay taken: the engine lives on, and tiers that are closed later take slots still', async () => {
    await rig.start();
    const client = await rig.attached();
    await client.call({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('y', 2) } }, 'reserved');
    await rig.server!.close();
    expect(rig.bench.arena.busySlots).toBe(2);
    expect(rig.server!.quarantined).toBe(0);
  });

  it('slots of a killed process come back', async () => {
    await rig.start();
    const script = `
      import { RawClient, packed } from ${JSON.stringify(new URL('./testing/raw-client.ts', import.meta.url).href)};
      const client = await RawClient.connect(${JSON.stringify(rig.socketPath)});
      await client.attach();
      await client.call({ $case: 'reserve', value: { parent: Buffer.alloc(0), hashes: packed('k', 4) } }, 'reserved');
      process.stdout.write('reserved');
      if (process.argv[1] === 'end') client.socket.destroy();
      setInterval(() => {}, 1000);`;
    const child = spawn(process.execPath, ['--import', 'tsx', '--input-type=module', '-e', script, 'end'], {
      stdio: ['ignore', 'pipe', 'inherit'],
    });
    try {
      await once(child.stdout, 'data');
      await vi.waitUntil(() => rig.server!.quarantined === 1, patience);
      expect(rig.bench.arena.busySlots).toBe(4);
      await rig.attached(); // our own process: it cannot lift what is not its own
      expect(rig.server!.quarantined).toBe(1);
    } finally {
      child.kill('SIGKILL');
    }
    await once(child, 'exit');
    await vi.waitUntil(() => rig.server!.quarantined === 0, patience);
    expect(rig.bench.arena.busySlots).toBe(0);
    expect(rig.bench.store.counters.get('quarantine.lifted.process_dead')).toBe(1);
  });
});
