/** The API server's life: clients that leave, an engine that comes and goes, health, metrics, start and end. */
import http from 'node:http';
import { connect } from 'node:net';
import { KvError } from '@kvtier/errors';
import { Fleet } from '@kvtier/registry';
import { cacheUse, event, say } from '@kvtier/registry/testing';
import { describe, expect, it, vi } from 'vitest';
import { type ApiServerOptions, startApiServer } from './api-server.ts';
import { caught, Harness, ids, jsonOf, silent, text } from './testing/harness.ts';

/** Of conditions that hold at once, on a machine that does many other things. */
const patience = { timeout: 20_000 };

const at = new Harness();

describe('a client that leaves', () => {
  it('before the first token: the engine’s call is cancelled', async () => {
    const abort = new AbortController();
    const pending = at.client.completions.create({ model: 'demo', prompt: 'a' }, { signal: abort.signal });
    const ended = expect(pending).rejects.toThrow('aborted');
    await vi.waitUntil(() => at.engine.seen.length === 1, { timeout: 10_000 });
    abort.abort();
    await ended;
    await at.engine.seen[0]!.cancelled;
    await vi.waitUntil(
      async () => (await at.metricsText()).includes('requests_total{route="/v1/completions",status="499"} 1'),
      { timeout: 10_000 },
    );
    expect(await at.metricsText()).toContain('kvtier_requests_running 0');
  });

  it('in the middle of a stream: the same', async () => {
    at.engine.script = (call) => void call.write(event({ tokenIds: ids(' 34') }));
    const stream = await at.client.completions.create({ model: 'demo', prompt: 'a', n: 2, stream: true });
    for await (const chunk of stream) {
      expect(chunk.choices[0]!.text).toBe(' 34');
      break; // the OpenAI client aborts the request
    }
    await Promise.all(at.engine.seen.map((seen) => seen.cancelled));
    expect(at.engine.seen).toHaveLength(2);
  });

  it('that does not read has no more kept for it than it asked for: an engine that gives more is cut off', async () => {
    const tokensPerEvent = 2_000;
    const text = ' Photographer'.repeat(tokensPerEvent);
    const tokenIds = ids(text);
    const wantedBytes = 64 << 20; // far beyond what the kernel and the streams between may hold
    let writtenBytes = 0;
    let isCut = false;
    at.engine.script = async (call) => {
      call.on('cancelled', () => {
        isCut = true;
      });
      while (writtenBytes < wantedBytes && !isCut) {
        writtenBytes += text.length;
        if (call.write(event({ tokenIds }))) await new Promise(setImmediate);
        else await new Promise((resolve) => call.once('drain', () => resolve(undefined)));
      }
    };
    const body = JSON.stringify({ prompt: 'a', stream: true, max_tokens: 4_000 });
    const socket = connect(Number(new URL(at.server.url).port), '127.0.0.1').pause();
    socket.write(
      `POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: ${body.length}\r\n\r\n${body}`,
    );
    await vi.waitUntil(() => isCut || writtenBytes >= wantedBytes, { timeout: 20_000 });
    expect(writtenBytes).toBeLessThan(wantedBytes / 2);
    socket.destroy();
    await at.engine.seen[0]!.cancelled;
  });
});

describe('models, health, metrics, admin', () => {
  it('lists the one model', async () => {
    const listed = await at.client.models.list();
    expect(listed.data).toEqual([
      {
        ...{ id: 'demo', object: 'model', created: expect.any(Number), owned_by: 'kvtier', root: 'demo' },
        max_model_len: 4_096,
      },
    ]);
    expect((await at.client.models.retrieve('demo')).id).toBe('demo');
  });

  it('health says what is served', async () => {
    const response = await fetch(`${at.server.url}/health`);
    expect([response.status, await response.json()]).toEqual([
      200,
      {
        status: 'ok',
        engine: {
          model: 'demo',
          backend: 'cpu',
          max_model_tokens: 4_096,
          tier_attached: true,
          block_tokens: 16,
          block_count: 100,
          block_bytes: 16_384,
        },
        models: ['demo'],
        workers: [{ name: 'a', kind: 'kvtier', role: 'both', state: 'ready', model: 'demo', waiting: 0, running: 0 }],
        degraded: [],
        progress: { running: 0, finished: 0, silent_ms: 0 },
      },
    ]);
  });

  it('health is 503 when answers run without a token', async () => {
    await at.open({ limits: { stallMs: 0, retryMs: 0 } });
    const pending = at.client.completions.create({ model: 'demo', prompt: 'a' }).catch(() => 'ended');
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/health`)).status === 503, patience);
    await at.engine.stop();
    expect(await pending).toBe('ended');
  });

  it('metrics are ours and the engine’s', async () => {
    at.engine.script = say(ids(' 34'), 'length', cacheUse({ cachedTokens: 3, tokensByTier: { disk: 3 } }));
    await at.client.completions.create({ model: 'demo', prompt: 'a' });
    const text = await at.metricsText();
    expect(text).toContain('kvtier_requests_total{route="/v1/completions",status="200"} 1');
    expect(text).toContain('kvtier_request_cached_tokens_total{tier="disk"} 3');
    expect(text).toContain('kvtier_request_engine_up 1');
    expect(text).toMatch(/\nkvtier_engine_steps_total 7\n$/);
  });

  it('resets the engine’s prefix cache', async () => {
    expect(await (await at.post('/admin/reset_prefix_cache', {})).json()).toEqual({ done: true });
    expect(await (await fetch(`${at.server.url}/admin/reset_prefix_cache`, { method: 'POST' })).json()).toEqual({
      done: false,
    });
  });

  it('pins a prefix by name, of text or of token ids, and unpins it', async () => {
    const pin = async (body: object) => {
      const answer = await at.post('/admin/pin_prefix', body);
      return [answer.status, await answer.json()];
    };
    const unpin = async (name: string) => (await at.post('/admin/unpin_prefix', { name })).json();
    expect(await pin({ name: 'a', prompt: [5, 6, 7] })).toEqual([200, { pinned_tokens: 3 }]);
    expect(await pin({ name: 'b', prompt: ' 34', cache_salt: 's' })).toMatchObject([200, {}]);
    expect(at.engine.pins).toEqual([
      { name: 'a', promptTokenIds: [5, 6, 7], cacheSalt: '' },
      { name: 'b', promptTokenIds: expect.arrayContaining(ids(' 34')), cacheSalt: 's' },
    ]);
    expect([await unpin('a'), await unpin('a')]).toEqual([{ done: true }, { done: false }]);
    expect(at.engine.pins.map(({ name }) => name)).toEqual(['b']);
  });

  it('says why a prefix is not pinned', async () => {
    const refused = async (body: object) => {
      const answer = await at.post('/admin/pin_prefix', body);
      const { error } = (await answer.json()) as { error: { code: string; param: string; message: string } };
      return [answer.status, error.code, error.param];
    };
    expect(await refused({ prompt: 'x' })).toEqual([400, 'missing_required_parameter', 'name']);
    expect(await refused({ name: 'a', prompt: ['x', 'y'] })).toEqual([400, 'invalid_value', 'prompt']);
    expect(await refused({ name: 'a', prompt: 'x', max_tokens: 1 })).toEqual([400, 'unknown_parameter', 'max_tokens']);
    at.engine.pinRefusal = new KvError('CONFIG', 'pinned prefix a: 0 of 0 blocks are pinned');
    expect(await refused({ name: 'a', prompt: 'x' })).toEqual([409, 'pin_refused', null]);
    at.engine.pinRefusal = new KvError('REQUEST', 'pin: a name of 257 characters; give 1 to 256');
    expect(await refused({ name: 'a', prompt: 'x' })).toEqual([400, 'invalid_value', null]);
  });

  it('names a request as the client did', async () => {
    const named = (id: string) => fetch(`${at.server.url}/health`, { headers: { 'x-request-id': id } });
    expect((await named('mine-1')).headers.get('x-request-id')).toBe('mine-1');
    expect((await named('not this one')).headers.get('x-request-id')).toMatch(/^[0-9a-f-]{36}$/);
  });
});

describe('an engine that comes and goes', () => {
  it('ends running requests clearly when no other comes in time, is 503 while away, and is found again', async () => {
    await at.open({ limits: { retryMs: 0 } });
    at.engine.script = (call) => void call.write(event({ tokenIds: ids(' 34') }));
    const stream = await at.client.completions.create({ model: 'demo', prompt: 'a', stream: true });
    const reading = (async () => {
      for await (const _ of stream);
    })();
    const streamEnded = caught(reading);
    await vi.waitUntil(() => at.engine.seen.length === 1, patience);
    await at.engine.stop();
    expect((await streamEnded).error).toMatchObject({ code: 'engine_unavailable' });
    const { status, error, headers } = await caught(at.client.completions.create({ model: 'demo', prompt: 'a' }));
    expect([status, headers!.get('retry-after')]).toEqual([503, '1']);
    expect(error).toMatchObject({ type: 'server_error', code: 'engine_unavailable' });
    const health = await fetch(`${at.server.url}/health`);
    expect([health.status, (await jsonOf(health)).error.code]).toEqual([503, 'engine_unavailable']);
    expect(await at.metricsText()).toContain('kvtier_request_engine_up 0');

    at.engine = await at.start('a');
    at.engine.script = say(ids(' 34'), 'length');
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/health`)).status === 200, { timeout: 20_000 });
    expect((await at.client.completions.create({ model: 'demo', prompt: 'a' })).choices[0]!.text).toBe(' 34');
  });

  it('may come after the API server', async () => {
    await at.engine.stop();
    await at.open({ firstContactMs: 0 });
    expect((await fetch(`${at.server.url}/v1/models`)).status).toBe(503);
    at.engine = await at.start('a');
    await vi.waitUntil(async () => (await fetch(`${at.server.url}/v1/models`)).status === 200, { timeout: 20_000 });
  });

  it('with a model that has no tokenizer: the start fails with one line', async () => {
    at.engine.description = { ...at.engine.description, modelDir: at.dir };
    await expect(at.open()).rejects.toMatchObject({
      code: 'MODEL',
      message: expect.stringContaining('tokenizer.json'),
    });
  });
});

describe('the start', () => {
  const start = (part: Partial<ApiServerOptions>) =>
    startApiServer({
      host: '127.0.0.1',
      port: 0,
      engines: at.fleet,
      dispatch: at.dispatcher,
      logger: silent,
      text,
      ...part,
    });

  it('says when the port is taken', async () => {
    const port = Number(new URL(at.server.url).port);
    await expect(start({ port })).rejects.toMatchObject({
      code: 'LOCKED',
      message: `127.0.0.1:${port}: another process listens there; choose another port with --port, or port in its configuration`,
    });
  });

  it('waits for nobody where no worker is known', async () => {
    const nobody = new Fleet({ logger: silent });
    const server = await start({ engines: nobody, firstContactMs: 600_000 });
    expect((await fetch(`${server.url}/v1/models`)).status).toBe(503);
    await server.close();
    await nobody.close();
  });

  it('refuses to listen beyond this machine', async () => {
    await expect(start({ host: '0.0.0.0' })).rejects.toMatchObject({ code: 'CONFIG' });
  });

  it('makes one server, with its limits, which lives on when it cannot accept a connection', async () => {
    const made = vi.spyOn(http, 'createServer');
    const server = await start({ host: 'localhost' });
    try {
      expect(made.mock.results).toHaveLength(1);
      expect(new URL(server.url).hostname).toBe('127.0.0.1');
      for (let i = 0; i < 3; i++)
        (made.mock.results[0]!.value as http.Server).emit('error', new Error('accept EMFILE'));
      expect((await fetch(`${server.url}/v1/models`)).status).toBe(200);
    } finally {
      made.mockRestore();
      await server.close();
    }
  });
});

describe('the end', () => {
  it('cuts answers after the grace and tells their clients', async () => {
    await at.open({ limits: { closeGraceMs: 20 } });
    const pending = caught(at.client.completions.create({ model: 'demo', prompt: 'a' }));
    await vi.waitUntil(() => at.engine.seen.length === 1, patience);
    await at.server.close();
    expect((await pending).error).toMatchObject({ message: 'the API server is closing; try again' });
    await at.engine.seen[0]!.cancelled;
  });

  it.each(['/v1/completions', '/nowhere'])(
    'a %s behind an answer that runs is refused like all that fails',
    async (path) => {
      const calls: Parameters<typeof at.engine.script>[0][] = [];
      at.engine.script = (call) => void calls.push(call);
      await at.open({ limits: { closeGraceMs: 20_000 }, operations: { host: '127.0.0.1', port: 0 } });
      const { port } = new URL(at.server.url);
      const request = (path: string): string => {
        const body = '{"prompt":"a"}';
        const head = `POST ${path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\nx-request-id: mine\r\n`;
        return `${head}content-length: ${body.length}\r\n\r\n${body}`;
      };
      const socket = connect(Number(port), '127.0.0.1');
      let answers = '';
      const ended = new Promise((resolve) => socket.on('data', (bytes) => (answers += bytes)).once('end', resolve));
      socket.write(request('/v1/completions'));
      await vi.waitUntil(() => calls.length === 1, patience);
      // It keeps the server open while the answers before it are looked at.
      const last = at.client.completions.create({ model: 'demo', prompt: 'a' });
      last.catch(() => {}); // it is cut where what is expected here fails
      await vi.waitUntil(() => calls.length === 2, patience);
      const closed = at.server.close();
      socket.write(request(path));
      const finish = say(ids(' 34'), 'length');
      void finish(calls[0]!);
      await ended;
      const [, first, second] = answers.split('HTTP/1.1 ');
      expect(first).toMatch(/^200 .*"finish_reason":"length"/s);
      const [head, body] = second!.split('\r\n\r\n');
      expect(head).toMatch(/^503 /);
      expect(head!.toLowerCase().split('\r\n')).toEqual(
        expect.arrayContaining(['connection: close', 'retry-after: 1', 'x-request-id: mine']),
      );
      expect(JSON.parse(body!)).toEqual({
        error: {
          ...{ message: 'the API server is closing; try again', type: 'server_error' },
          ...{ param: null, code: 'engine_unavailable' },
        },
      });
      const route = path === '/nowhere' ? 'unknown' : path;
      const metrics = await (await fetch(`${at.server.operationsUrl}/metrics`)).text();
      expect(metrics).toContain(`\nkvtier_requests_total{route="${route}",status="503"} 1\n`);
      void finish(calls[1]!);
      expect((await last).choices[0]!.finish_reason).toBe('length');
      await closed;
      expect(at.engine.seen).toHaveLength(2);
    },
  );
});
