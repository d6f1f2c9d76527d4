/** Beyond loopback: who is let in, by keys, by certificates or by a network that is trusted; and the listener of probes and scrapes. */
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { type RequestOptions, request } from 'node:https';
import { connect } from 'node:net';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { ownCertificate, renew } from '@kvtier/config/testing';
import { say } from '@kvtier/registry/testing';
import OpenAI, { AuthenticationError } from 'openai';
import { afterAll, beforeAll, describe, expect, it, vi } from 'vitest';
import { caught, Harness, ids } from './testing/harness.ts';

const at = new Harness();
const everywhere = '0.0.0.0';
const patience = { timeout: 20_000, interval: 5 };
const [user, admin] = ['sk-user-0123456789', 'sk-admin-0123456789'];
let folder: string;
const inFolder = (name: string): string => join(folder, name);

beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-beyond-'));
  for (const name of ['first', 'second', 'client']) ownCertificate(folder, name);
  writeFileSync(inFolder('keys'), `${user}\n`, { mode: 0o600 });
  writeFileSync(inFolder('admins'), `${admin}\n`, { mode: 0o600 });
});
afterAll(() => rmSync(folder, { recursive: true }));

const use = (name: string): void => {
  for (const kind of ['key', 'pem']) renew(folder, `${name}.${kind}`, `server.${kind}`);
};

const tlsOf = (clientCa?: string) => {
  use('first');
  const clientCaFile = clientCa === undefined ? null : inFolder(`${clientCa}.pem`);
  return { certFile: inFolder('server.pem'), keyFile: inFolder('server.key'), clientCaFile, reloadMs: 5 };
};
const portOf = (url: string): number => Number(new URL(url).port);
const local = (url: string, path: string): string => `${new URL(url).protocol}//127.0.0.1:${portOf(url)}${path}`;

interface Asking {
  readonly key?: string;
  /** Whose certificate is shown. */
  readonly as?: string;
  readonly authority?: string;
  readonly method?: string;
  readonly headers?: Readonly<Record<string, string>>;
  readonly body?: string;
}

/** Status, code of the error, and headers; 0: TLS did not come about. */
function ask(path: string, { key, as, authority = 'first', method = 'GET', headers, body }: Asking = {}) {
  const shown =
    as === undefined ? {} : { cert: readFileSync(inFolder(`${as}.pem`)), key: readFileSync(inFolder(`${as}.key`)) };
  const options: RequestOptions = {
    ...{ method, agent: false, ca: readFileSync(inFolder(`${authority}.pem`)), ...shown },
    headers: { ...(key !== undefined && { authorization: `Bearer ${key}` }), ...headers },
  };
  return new Promise<{ status: number; code: string; headers: Record<string, unknown> }>((resolve) => {
    const asked = request(local(at.server.url, path), options, (response) => {
      let text = '';
      response.on('data', (bytes) => (text += bytes));
      response.on('end', () => {
        const code = /"code":"(\w+)"/.exec(text)?.[1] ?? '';
        resolve({ status: response.statusCode!, code, headers: response.headers });
      });
    });
    asked.on('error', () => resolve({ status: 0, code: '', headers: {} }));
    asked.end(body);
  });
}
const statuses = async (path: string, ...askings: Asking[]): Promise<number[]> =>
  (await Promise.all(askings.map((asking) => ask(path, asking)))).map(({ status }) => status);

it('does not listen without TLS, nor with TLS for everybody', async () => {
  const refused = { code: 'CONFIG', message: expect.stringContaining('0.0.0.0: is not loopback') };
  await expect(at.open({ host: everywhere })).rejects.toMatchObject(refused);
  await expect(at.open({ host: everywhere, tls: tlsOf() })).rejects.toMatchObject(refused);
  await expect(at.open({ host: everywhere, apiKeysFile: inFolder('keys') })).rejects.toMatchObject(refused);
  await expect(at.open({ operations: { host: everywhere, port: 0 } })).rejects.toMatchObject(refused);
});

describe('with keys', () => {
  const keys = () => ({ host: everywhere, tls: tlsOf(), apiKeysFile: inFolder('keys') });

  it('each request bears one, whatever it asks for; what is refused has OpenAI’s form', async () => {
    await at.open(keys());
    expect(at.server.url).toMatch(/^https:/);
    for (const path of ['/v1/models', '/health', '/metrics', '/admin/planner', '/nowhere']) {
      const found = path === '/nowhere' ? 404 : 200;
      const asked = await statuses(path, {}, { key: 'sk-0123456789abcdef' }, { key: user }, { key: admin });
      expect([path, ...asked]).toEqual([path, 401, 401, found, 401]);
    }
    const refused = await ask('/v1/models');
    expect([refused.code, refused.headers['www-authenticate']]).toEqual(['invalid_api_key', 'Bearer']);
    const basic = { authorization: `Basic ${Buffer.from(`a:${user}`).toString('base64')}` };
    expect((await ask('/v1/models', { headers: basic })).status).toBe(401);
    // Nothing of its body is waited for.
    const large = { 'content-type': 'application/json', 'content-length': '10000000' };
    expect((await ask('/v1/completions', { method: 'POST', headers: large, body: '{' })).status).toBe(401);
    expect(at.engine.seen.length).toBe(0);
  });

  it('of administrators, no other may administer', async () => {
    await at.open({ ...keys(), adminKeysFile: inFolder('admins') });
    const reset = { method: 'POST' };
    const asked = await statuses('/admin/reset_prefix_cache', reset, { ...reset, key: user }, { ...reset, key: admin });
    expect([...asked, at.engine.resets]).toEqual([401, 403, 200, 1]);
    expect((await ask('/admin/planner', { key: user })).code).toBe('admin_key_required');
    // However its path is written.
    expect(await statuses('/%61dmin/planner', { key: user }, { key: admin })).toEqual([403, 200]);
    expect(await statuses('/v1/models', { key: user }, { key: admin })).toEqual([200, 200]);
  });

  it('on loopback, too; OpenAI’s client knows the refusal, and its key goes to no worker', async () => {
    await at.open({ apiKeysFile: inFolder('keys') });
    at.engine.script = say(ids(' 34'), 'length');
    const post = { model: 'demo', prompt: 'a', max_tokens: 1 };
    expect(await caught(at.client.completions.create(post))).toBeInstanceOf(AuthenticationError);
    const known = new OpenAI({ baseURL: `${at.server.url}/v1`, apiKey: user, maxRetries: 0 });
    expect((await known.completions.create(post)).choices.length).toBe(1);
  });
});

describe('with certificates', () => {
  it('only who shows one of the authority is let in, and may administer; a renewed pair serves the next', async () => {
    await at.open({ host: everywhere, tls: tlsOf('client') });
    expect(await statuses('/v1/models', {}, { as: 'second' }, { as: 'client' })).toEqual([0, 0, 200]);
    expect((await ask('/admin/reset_prefix_cache', { as: 'client', method: 'POST' })).status).toBe(200);
    use('second');
    await vi.waitUntil(
      async () => (await ask('/v1/models', { as: 'client', authority: 'second' })).status === 200,
      patience,
    );
    expect((await ask('/v1/models', { as: 'client' })).status).toBe(0);
  });

  it('and keys both are asked for', async () => {
    await at.open({ host: everywhere, tls: tlsOf('client'), apiKeysFile: inFolder('keys') });
    expect(await statuses('/v1/models', { key: user }, { as: 'client' }, { as: 'client', key: user })).toEqual([
      0, 401, 200,
    ]);
  });

  it('who does not begin TLS, or not as one should, is left, and holds up no end', async () => {
    await at.open({ host: everywhere, tls: tlsOf('client') });
    const plain = connect(portOf(at.server.url), '127.0.0.1');
    let told = '';
    plain.on('data', (bytes) => (told += bytes.toString('latin1')));
    plain.on('error', () => {});
    plain.write('GET /health HTTP/1.1\r\nhost: a\r\n\r\n');
    await new Promise((resolve) => plain.once('close', resolve));
    expect(told).not.toContain('HTTP');
    const silent = connect(portOf(at.server.url), '127.0.0.1');
    silent.on('error', () => {});
    await new Promise((resolve) => silent.once('connect', resolve));
    const left = new Promise((resolve) => silent.once('close', resolve));
    await at.server.close();
    await left;
  });
});

describe('on a trusted network', () => {
  const trusted = { host: everywhere, trustedNetwork: true };
  const get = (path: string, headers: Readonly<Record<string, string>> = {}, method = 'GET'): Promise<Response> =>
    fetch(local(at.server.url, path), { headers, method });

  it('everybody is answered under any name, but no page of another site, and nobody administers without a key', async () => {
    await at.open(trusted);
    expect(
      await at.rawRequest('GET /v1/models HTTP/1.1\r\nhost: kvtier.default.svc\r\nconnection: close\r\n\r\n'),
    ).toMatch(/^HTTP\/1\.1 200 /);
    expect((await get('/v1/models', { origin: 'https://evil.example' })).status).toBe(403);
    for (const path of ['/admin/reset_prefix_cache', '/admin/pin_prefix', '/admin/unpin_prefix', '/admin/drain']) {
      const refused = await get(path, {}, 'POST');
      expect([refused.status, await refused.json()]).toMatchObject([403, { error: { code: 'admin_key_required' } }]);
    }
    expect([(await get('/admin/planner')).status, at.engine.resets]).toEqual([403, 0]);
    await at.open({ ...trusted, adminKeysFile: inFolder('admins') });
    const bearing = (key: string) => ({ authorization: `Bearer ${key}` });
    const planner = await Promise.all(
      [{}, bearing(user), bearing(admin)].map((headers) => get('/admin/planner', headers)),
    );
    expect(planner.map(({ status }) => status)).toEqual([401, 401, 200]);
    expect((await get('/v1/models')).status).toBe(200);
  });
});

describe('the listener of probes and scrapes', () => {
  const status = async (path: string, method = 'GET'): Promise<number> =>
    (await fetch(local(at.server.operationsUrl!, path), { method })).status;

  it('needs no key, and serves nothing else', async () => {
    let isReady = false;
    await at.open({
      ...{ apiKeysFile: inFolder('keys'), isReady: () => isReady },
      operations: { host: everywhere, port: 0, trustedNetwork: true },
    });
    expect([await status('/health/live'), await status('/health/ready'), await status('/health')]).toEqual([
      200, 503, 200,
    ]);
    isReady = true;
    expect(await status('/health/ready')).toBe(200);
    const metrics = await (await fetch(local(at.server.operationsUrl!, '/metrics'))).text();
    expect(metrics).toContain('\nkvtier_requests_total{route="/health/ready",status="503"} 1\n');
    expect(metrics).toContain('\nkvtier_request_workers{state="ready"} 1\n');
    for (const path of ['/v1/models', '/admin/planner']) expect(await status(path)).toBe(404);
    for (const path of ['/v1/completions', '/admin/reset_prefix_cache']) expect(await status(path, 'POST')).toBe(404);
    expect(at.engine.resets).toBe(0);
  });

  it('is ready and live while no worker serves', async () => {
    await at.open({ operations: { host: '127.0.0.1', port: 0 } });
    await at.engine.stop();
    await vi.waitUntil(async () => (await status('/health')) === 503, patience);
    expect([await status('/health/live'), await status('/health/ready')]).toEqual([200, 200]);
  });

  it('a scrape that is not answered holds up no end', async () => {
    const moreMetrics = vi.fn(() => new Promise<string>(() => {}));
    await at.open({ operations: { host: '127.0.0.1', port: 0 }, moreMetrics });
    const scrape = status('/metrics').catch(() => 'cut');
    await vi.waitUntil(() => moreMetrics.mock.calls.length > 0, patience);
    // An answer of the API server has a second to say that it is cut: here no timer runs but those that are due at once.
    vi.useFakeTimers({ toFake: ['setTimeout', 'clearTimeout'] });
    try {
      let isClosed = false;
      const closing = at.server.close().then(() => (isClosed = true));
      for (const untilMs = performance.now() + patience.timeout; !isClosed && performance.now() < untilMs; ) {
        vi.advanceTimersByTime(0);
        await new Promise(setImmediate);
      }
      expect(isClosed).toBe(true);
      await closing;
    } finally {
      vi.useRealTimers();
    }
    expect(await scrape).toBe('cut');
  });
});

it('while all workers are refused, health and answers say why the first is, and what to do', async () => {
  await at.engine.stop();
  at.discovery.say(at.named('a'), { name: 'pod', kind: 'openai', address: 'http://10.1.2.3:8000' });
  await vi.waitUntil(() => at.fleet.workers().every((worker) => worker?.state !== 'ready'), patience);
  const message = expect.stringMatching(/^worker pod: .*; use https .*, or say "access": \{"trustedNetwork": true\}$/);
  const health = await fetch(`${at.server.url}/health`);
  expect([health.status, await health.json()]).toMatchObject([503, { error: { message } }]);
});
