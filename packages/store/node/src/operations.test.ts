/** The node's listener for probes and scrapes: who may ask, what is answered, and that nobody who asks badly costs others anything. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { request as requestPlain } from 'node:http';
import { request } from 'node:https';
import { connect, createServer, type Socket } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ownCertificate, renew } from '@kvtier/config/testing';
import { silent } from '@kvtier/placement/testing';
import { systemClock } from '@kvtier/runtime';
import { afterAll, afterEach, beforeAll, beforeEach, describe, expect, it, vi } from 'vitest';
import { type OperationsLimits, type OperationsOptions, type OperationsParts, OperationsServer } from './operations.ts';

const patience = { timeout: 20_000, interval: 5 };
const everywhere = '0.0.0.0';
let folder: string;
const inFolder = (name: string): string => join(folder, name);
let server: OperationsServer | undefined;
let why: string | undefined;
const lines: string[] = [];
const figures = vi.fn<OperationsParts['figures']>();

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-operations-'));
  for (const name of ['first', 'second', 'client']) ownCertificate(folder, name);
});
afterAll(() => rmSync(folder, { recursive: true }));
beforeEach(() => {
  why = undefined;
  figures.mockReset().mockReturnValue({ tiers: [], counters: { 'commit.blocks': 3, 'turns.longest_us': 2_000_000 } });
  lines.length = 0;
});
afterEach(async () => {
  await server?.close();
  server = undefined;
});

const log = { ...silent, error: (_fields: object, line: string) => void lines.push(line) };
const open = async (options: Partial<OperationsOptions> = {}, limits: Partial<OperationsLimits> = {}) => {
  const parts = { whyNotReady: () => why, figures, clock: systemClock, log, limits };
  server = await OperationsServer.open({ host: '127.0.0.1', port: 0, ...options }, parts);
  return server;
};
const portOf = (): number => Number(new URL(server!.url).port);
const get = (path: string, init: RequestInit = {}) => fetch(`http://127.0.0.1:${portOf()}${path}`, init);
const use = (name: string): void => {
  for (const kind of ['key', 'pem']) renew(folder, `${name}.${kind}`, `server.${kind}`);
};
const tlsOf = (clientCa?: string) => {
  use('first');
  const clientCaFile = clientCa === undefined ? null : inFolder(`${clientCa}.pem`);
  return { certFile: inFolder('server.pem'), keyFile: inFolder('server.key'), clientCaFile, reloadMs: 5 };
};

/** Names as long as they may be, of more tenants than a node knows: more text than a socket's buffers take. */
const manyTenants = Object.fromEntries(
  ['arena', 'disk'].flatMap((tier) =>
    Array.from({ length: 20_000 }, (_, i) => [`quota.bytes.${tier}.${`tenant-${i}`.padEnd(200, '"')}`, i]),
  ),
);

/** 0: TLS did not come about. */
function askTls(as?: string, authority = 'first'): Promise<number> {
  const shown =
    as === undefined ? {} : { cert: readFileSync(inFolder(`${as}.pem`)), key: readFileSync(inFolder(`${as}.key`)) };
  const options = { agent: false, ca: readFileSync(inFolder(`${authority}.pem`)), ...shown } as const;
  return new Promise((resolve) => {
    const asked = request(`https://127.0.0.1:${portOf()}/health/live`, options, (response) => {
      response.resume();
      resolve(response.statusCode!);
    });
    asked.on('error', () => resolve(0));
    asked.end();
  });
}

async function socket(): Promise<Socket> {
  const made = connect(portOf(), '127.0.0.1');
  made.on('error', () => {});
  made.resume();
  await new Promise((resolve) => made.once('connect', resolve));
  return made;
}
const ended = (one: Socket): Promise<unknown> => new Promise((resolve) => one.once('close', resolve));

describe('who is let in', () => {
  it('beyond loopback nobody, without a certificate or a network that is trusted', async () => {
    const refused = {
      code: 'CONFIG',
      message: expect.stringMatching(/^operations\.host: 0\.0\.0\.0 is not loopback; /),
    };
    await expect(open({ host: everywhere })).rejects.toMatchObject(refused);
    await expect(open({ host: everywhere, tls: tlsOf() })).rejects.toMatchObject(refused);
    await open({ host: everywhere, trustedNetwork: true });
    expect((await get('/health/live', { headers: { host: 'node.pods' } })).status).toBe(200);
  });

  it('who shows a certificate of the authority; a renewed pair serves the next connection', async () => {
    await open({ host: everywhere, tls: tlsOf('client') });
    expect(server!.url).toMatch(/^https:/);
    expect([await askTls('client'), await askTls('second'), await askTls()]).toEqual([200, 0, 0]);
    use('second');
    await vi.waitUntil(async () => (await askTls('client', 'second')) === 200, patience);
    expect(await askTls('client')).toBe(0);
  });

  it('no web page: neither by a name that points here nor from another site', async () => {
    await open();
    const asked = (headers: Record<string, string>): Promise<number> =>
      new Promise((resolve) => {
        requestPlain({ port: portOf(), path: '/metrics', headers, agent: false }, (response) => {
          response.resume();
          resolve(response.statusCode!);
        }).end();
      });
    expect(await asked({ host: 'evil.example' })).toBe(403);
    expect(await asked({ origin: 'http://evil.example' })).toBe(403);
    expect(await asked({ 'sec-fetch-site': 'cross-site' })).toBe(403);
    expect(await asked({ host: 'localhost:1' })).toBe(200);
    expect(figures).toHaveBeenCalledTimes(1);
  });
});

describe('what is answered', () => {
  it('live always, ready unless there is a reason, and the reason', async () => {
    await open();
    expect((await get('/health/ready')).status).toBe(200);
    why = 'draining: the node ends';
    const ready = await get('/health/ready');
    expect([ready.status, await ready.json()]).toEqual([503, { status: 'unavailable', why }]);
    const live = await get('/health/live?verbose=1');
    expect([live.status, await live.json()]).toEqual([200, { status: 'ok' }]);
  });

  it('figures in Prometheus’ text form, made a few times a second at most', async () => {
    await open();
    const texts = await Promise.all(Array.from({ length: 40 }, async () => (await get('/metrics')).text()));
    expect(texts[0]).toContain('\nkvtier_node_events{event="commit.blocks"} 3\n');
    expect(texts[0]).toContain('\nkvtier_node_longest_turn_seconds 2\n');
    expect(figures.mock.calls.length).toBeLessThanOrEqual(5);
    expect((await get('/metrics')).headers.get('content-type')).toBe('text/plain; version=0.0.4; charset=utf-8');
  });

  it('nothing else: other paths, other methods', async () => {
    await open();
    const status = async (path: string, method = 'GET'): Promise<number> => (await get(path, { method })).status;
    for (const path of ['/', '/health', '/metrics/', '/admin/planner', '/constructor', '//metrics'])
      expect([path, await status(path)]).toEqual([path, 404]);
    const posted = await get('/metrics', { method: 'POST', body: 'x'.repeat(1 << 20) }).catch(() => undefined);
    if (posted) expect([posted.status, posted.headers.get('allow')]).toEqual([405, 'GET, HEAD']); // else it was cut
    const small = await get('/metrics', { method: 'POST', body: 'x' });
    expect([small.status, small.headers.get('allow')]).toEqual([405, 'GET, HEAD']);
    expect([await status('/metrics', 'DELETE'), await status('/metrics', 'HEAD')]).toEqual([405, 200]);
    expect(await (await get('/metrics', { method: 'HEAD' })).text()).toBe('');
  });

  it('a defect is a 500 and one line, and the next answer comes', async () => {
    await open({}, { figuresMs: 0 });
    figures.mockImplementationOnce(() => {
      throw new Error('planted');
    });
    const failed = await get('/metrics');
    expect([failed.status, await failed.text()]).toEqual([500, expect.not.stringContaining('planted')]);
    expect(lines).toEqual(['operations: a request failed']);
    expect((await get('/metrics')).status).toBe(200);
  });
});

describe('whoever asks badly', () => {
  it('a head that does not come, or comes drop by drop, is given up at its deadline', async () => {
    await open({}, { receiveMs: 100 });
    const [mute, slow] = [await socket(), await socket()];
    slow.write('GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n');
    const drops = setInterval(() => slow.write('x: y\r\n'), 10);
    await Promise.all([ended(mute), ended(slow)]);
    clearInterval(drops);
    expect((await get('/health/live')).status).toBe(200);
  });

  it('a head that is too long, or is no HTTP', async () => {
    await open();
    for (const [head, status] of [
      [`GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\nx: ${'y'.repeat(9_000)}\r\n\r\n`, 431],
      ['nonsense\r\n\r\n', 400],
    ] as const) {
      const one = await socket();
      let text = '';
      one.on('data', (bytes) => (text += bytes));
      one.write(head);
      await ended(one);
      expect(text).toMatch(new RegExp(`^HTTP/1\\.1 ${status} `));
    }
  });

  it.each(['expect: 100-continue\r\n', ''])('a body is not waited for, nor read (%j)', async (expect100) => {
    await open({}, { receiveMs: 600_000 });
    const one = await socket();
    let text = '';
    one.on('data', (bytes) => (text += bytes));
    one.write(`GET /health/live HTTP/1.1\r\nhost: 127.0.0.1\r\n${expect100}content-length: 1000000\r\n\r\n{`);
    await ended(one);
    expect(text).toMatch(/^HTTP\/1\.1 200 [\s\S]*connection: close/i);
  });

  it('an answer that is not taken is given up; until then it counts as one', async () => {
    await open({}, { answerMs: 300, requests: 1 });
    figures.mockReturnValue({ tiers: [], counters: manyTenants });
    const one = await socket();
    const cut = ended(one);
    one.pause();
    one.write('GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n');
    await vi.waitUntil(() => figures.mock.calls.length > 0, patience);
    await expect(get('/health/live')).rejects.toThrow();
    await vi.waitUntil(
      () =>
        get('/health/live').then(
          ({ ok }) => ok,
          () => false,
        ),
      patience,
    );
    one.resume();
    await cut;
  });

  it('thousands of requests at once cost their connection', async () => {
    await open();
    const many = await socket();
    many.write('GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n'.repeat(5_000));
    await ended(many);
    expect((await get('/health/live')).status).toBe(200);
    expect(figures).toHaveBeenCalledTimes(1);
  });

  it('answers that wait for an earlier one on their connection end with it', async () => {
    await open({}, { requests: 8, figuresMs: 600_000 });
    figures.mockReturnValue({ tiers: [], counters: manyTenants });
    await (await get('/metrics')).text();
    for (let round = 0; round < 5; round++) {
      const many = await socket();
      many.pause();
      many.write('GET /metrics HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n'.repeat(7));
      // The first one is too long to go, and the others wait for it.
      await vi.waitUntil(() => many.readableLength > 0 || many.bytesRead > 0, patience);
      many.resetAndDestroy();
      const isWell = () =>
        get('/health/live').then(
          ({ ok }) => ok,
          () => false,
        );
      await vi.waitUntil(isWell, { timeout: 20_000, interval: 5 });
    }
  }, 60_000);

  it('who is idle gives way: connections that others hold open keep no probe out', async () => {
    await open({}, { connections: 8 });
    const held: Socket[] = [];
    for (let i = 0; i < 20; i++) held.push(await socket());
    for (let i = 0; i < 20; i++) expect((await get('/health/ready', { keepalive: false })).status).toBe(200);
    await vi.waitUntil(() => held.filter((one) => one.destroyed || one.readableEnded).length >= 12, patience);
    for (const one of held) one.destroy();
  });
});

describe('where it listens', () => {
  it('a port that is taken, and an address of another machine, are one line each', async () => {
    const other = createServer();
    const port = await new Promise<number>((resolve) => {
      other.listen(0, '127.0.0.1', () => resolve((other.address() as { port: number }).port));
    });
    await expect(open({ port })).rejects.toMatchObject({
      code: 'LOCKED',
      message: `operations.port: 127.0.0.1:${port}: another process listens there; choose another port`,
    });
    other.close();
    await expect(open({ host: '192.0.2.1', trustedNetwork: true })).rejects.toMatchObject({
      code: 'SETUP',
      message: 'operations.host: 192.0.2.1:0: cannot listen (EADDRNOTAVAIL); name an address of this machine',
    });
  });

  it('its end is at once, whoever is connected', async () => {
    await open({}, {});
    const idle = await socket();
    idle.resume();
    const closed = ended(idle);
    await server!.close(); // which waited for it would not end before it
    await closed;
    await expect(get('/health/live')).rejects.toThrow();
    server = undefined;
  });
});
