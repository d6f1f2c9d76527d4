/** A fleet over real engine workers: who is stopped, killed, ended and started again, and what their load says under all of it. */
import { execFileSync } from 'node:child_process';
import { setMaxListeners } from 'node:events';
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import type { KvError } from '@kvtier/errors';
import { type Access, EngineCalls, Fleet, type Worker } from '@kvtier/registry';
import { greedy, Pod, SpokenDiscovery } from '@kvtier/registry/testing';
import { Watch } from '@kvtier/runtime';
import { createLogger } from '@kvtier/telemetry';
import { afterAll, beforeAll, expect, it, vi } from 'vitest';
import { CpuWaits } from '../e2e/cpu-waits.ts';
import { modelDir, Service } from './engine-rig.ts';

const folder = mkdtempSync(join(tmpdir(), 'kvtier-fleet-'));
const patience = { timeout: 60_000, interval: 2 };
const never = new AbortController().signal;
setMaxListeners(0, never); // all calls share it
const prompt = Array.from({ length: 300 }, (_, i) => 100 + ((i * 7) % 1_000));

const service = (name: string, config: object = {}): Service =>
  new Service('engine-worker', {
    modelDir,
    servedName: 'demo',
    listen: `unix:${join(folder, name)}`,
    cacheNodeSocket: null,
    kvBytes: 32 << 20,
    maxStepTokens: 64,
    maxSequences: 8,
    threads: 1,
    logLevel: 'warn',
    ...config,
  });
const [a, b] = [service('a', { drainMs: 6_000 }), service('b')];
const fleet = new Fleet({ logger: createLogger('fleet-test', 'silent') });

/** Of what counts and compares: no worker is silent that a busy machine keeps waiting. */
const times = { silentMs: 20_000, askMs: 20_000 };
const patient = new Fleet({ logger: createLogger('fleet-test', 'silent'), times });

const worker = (name: string, by = fleet): Worker => by.workers().find((one) => one?.record.name === name)!;
/** Milliseconds until it is so, less those in which this process stood still: the fleet's own clock. */
async function until(name: string, state: string, by = fleet): Promise<number> {
  const clock = new Watch(10, () => {});
  const from = clock.nowMs();
  await vi.waitFor(() => expect(worker(name, by).state).toBe(state), patience);
  const tookMs = clock.nowMs() - from;
  clock.stop();
  return tookMs;
}

async function ask(
  name: string,
  requestId: string,
  maxTokens = 8,
  promptTokenIds = prompt,
  by = fleet,
): Promise<number[]> {
  const { number } = worker(name, by);
  const sent = by.sent(number, { requestId, tokensAhead: promptTokenIds.length, blocks: 20, loadS: 0 });
  const tokens: number[] = [];
  try {
    for await (const { tokenIds } of by.generate(
      number,
      greedy({ requestId, promptTokenIds, maxTokens, ignoreEos: true }),
      never,
    )) {
      if (tokens.length === 0) sent.firstToken();
      tokens.push(...tokenIds);
    }
    return tokens;
  } finally {
    sent.ended();
  }
}

/** A worker that the machine keeps for so long from its word, or us from hearing it, may be late with it. */
const lateMs = 300;
const pidOf = (name: string): number | undefined => (name === 'a' ? a : b).pid;

/** What `work` at a worker that is ready comes to: once more where it was cut off though the worker was only late. */
async function unlessLate<T>(name: string, work: () => Promise<T>, by = fleet): Promise<T> {
  for (;;) {
    await until(name, 'ready', by);
    const watch = new Watch(50, () => {});
    const lostMs = (): number => performance.now() - watch.nowMs();
    const [waits, beforeMs] = [new CpuWaits(() => [[pidOf(name)]]), lostMs()];
    try {
      return await work();
    } catch (error) {
      const isLate = waits.ms + lostMs() - beforeMs > lateMs;
      if ((error as KvError).code !== 'DISCONNECTED' || !isLate) throw error;
    } finally {
      watch.stop();
    }
  }
}

const askReady = (name: string, requestId: string, maxTokens = 8, by = fleet): Promise<number[]> =>
  unlessLate(name, () => ask(name, requestId, maxTokens, prompt, by), by);

/** Something that runs at `a`, and why it ends. */
const beginLong = (): Promise<{ readonly ended: Promise<unknown> }> =>
  unlessLate('a', async () => {
    const asked = ask('a', 'long', 2_000);
    const ended = asked.catch((error: unknown) => error);
    await Promise.race([asked, vi.waitUntil(() => worker('a').load.running === 1, patience)]);
    return { ended };
  });

/** Beyond what a busy machine keeps its process waiting for a CPU. */
async function isReadySoon(name: string): Promise<void> {
  const waits = new CpuWaits(() => [[pidOf(name)]]);
  const tookMs = await until(name, 'ready');
  expect(tookMs).toBeLessThan(2_000 + waits.ms);
}

const restOf = (name: string, by = fleet) => {
  const { waiting, running, tokensAhead, usedBlocks, waitingBlocks, loadAheadS } = worker(name, by).load;
  return { waiting, running, tokensAhead, usedBlocks, waitingBlocks, loadAheadS };
};
const rest = { waiting: 0, running: 0, tokensAhead: 0, usedBlocks: 0, waitingBlocks: 0, loadAheadS: 0 };

beforeAll(async () => {
  await Promise.all([a.start(), b.start()]);
  for (const by of [fleet, patient]) {
    const discovery = new SpokenDiscovery();
    await by.start(discovery);
    discovery.say(
      { name: 'a', address: `unix:${join(folder, 'a')}` },
      { name: 'b', address: `unix:${join(folder, 'b')}` },
    );
  }
  await Promise.all([fleet, patient].flatMap((by) => [until('a', 'ready', by), until('b', 'ready', by)]));
}, 60_000);
afterAll(async () => {
  await a.signal('SIGCONT');
  await Promise.all([fleet.close(), patient.close()]);
  await Promise.all([a.signal('SIGTERM'), b.signal('SIGTERM')]);
  rmSync(folder, { recursive: true, force: true });
});

it('two workers of one model agree, measure themselves, and are at rest when all has ended', async () => {
  const [first, second] = [worker('a', patient).facts!, worker('b', patient).facts!];
  expect(first.modelDigest).toMatch(/^[0-9a-f]{64}$/);
  expect({ ...second, bootEpoch: '' }).toEqual({ ...first, bootEpoch: '' });
  expect(second.bootEpoch).not.toBe(first.bootEpoch);
  const mine = Array.from({ length: 40 }, (_, i) =>
    ask('a', `r${i}`, 4 + (i % 5), [...prompt.slice(0, 200 + i), i], patient),
  );
  expect(worker('a', patient).load.waiting).toBe(40);
  let most = 0;
  const look = (): void => {
    const { waiting, running } = worker('a', patient).load;
    most = Math.max(most, waiting + running);
  };
  look();
  const stop = patient.onLoad(look);
  await Promise.all(mine).finally(stop);
  expect(most).toBe(40);
  await vi.waitFor(() => expect(restOf('a', patient)).toEqual(rest), patience);
  const { prefillTokensPerS, stepS, stepPerRequestS, freedBlocksPerS } = worker('a', patient).load;
  // Where each request adds as much as the first, a step's start is nothing.
  for (const rate of [prefillTokensPerS, stepS + stepPerRequestS, freedBlocksPerS]) expect(rate).toBeGreaterThan(0);
}, 120_000);

it('two coordinators that know nothing of each other count each request once', async () => {
  const other = new Fleet({ logger: createLogger('fleet-test', 'silent'), times });
  const heard = new SpokenDiscovery();
  await other.start(heard);
  heard.say({ name: 'a', address: `unix:${join(folder, 'a')}` });
  await vi.waitFor(() => expect(other.workers()[0]?.state).toBe('ready'), patience);
  const views = [worker('a', patient), other.workers()[0]!];
  const most = [0, 0];
  const look = (): void =>
    views.forEach(({ load: { waiting, running } }, i) => {
      most[i] = Math.max(most[i]!, waiting + running);
    });
  const stops = [patient.onLoad(look), other.onLoad(look)];
  const asked = Array.from({ length: 60 }, (_, i) => {
    const promptTokenIds = [...prompt.slice(0, 100), i];
    return ask('a', `both${i}`, 64, promptTokenIds, i % 2 === 0 ? patient : other);
  });
  expect(views.map(({ load }) => load.waiting)).toEqual([30, 30]);
  // The worker's own word brings each the other's.
  await vi.waitFor(() => expect(most).toEqual([60, 60]), patience);
  await Promise.all(asked);
  expect(most).toEqual([60, 60]);
  for (const stop of stops) stop();
  await vi.waitFor(() => {
    for (const { load } of views) expect(load).toMatchObject(rest);
  }, patience);
  await other.close();
}, 120_000);

it('one that is stopped is silent within a second, what it had ends, and it is back when it goes on', async () => {
  const long = await beginLong();
  await a.signal('SIGSTOP');
  const silentMs = await until('a', 'silent');
  expect(await long.ended).toMatchObject({ code: 'DISCONNECTED', retry: true });
  expect(silentMs).toBeLessThan(1_100);
  expect(await askReady('b', 'meanwhile')).toHaveLength(8);
  await a.signal('SIGCONT');
  await isReadySoon('a');
  await vi.waitFor(() => expect(restOf('a')).toEqual(rest), patience);
  expect(await askReady('a', 'after')).toEqual(await askReady('b', 'after'));
}, 120_000);

it('one that is killed is silent at once, and a new life of it is seen and ready soon', async () => {
  const { bootEpoch } = worker('a').facts!;
  const long = await beginLong();
  await a.signal('SIGKILL');
  expect(await until('a', 'silent')).toBeLessThan(500);
  expect(await long.ended).toMatchObject({ code: 'DISCONNECTED', retry: true });
  await a.start();
  await isReadySoon('a');
  expect(worker('a').facts!.bootEpoch).not.toBe(bootEpoch);
  await vi.waitFor(() => expect(restOf('a')).toEqual(rest), patience);
  expect(await askReady('a', 'after')).toEqual(await askReady('b', 'after'));
}, 120_000);

it('one that is told to end drains: nothing new, and what it has to its end', async () => {
  const alone = await askReady('b', 'judge', 100, patient);
  await until('a', 'ready', patient);
  let drains = false;
  const stop = patient.onChange(() => {
    drains ||= worker('a', patient).state === 'draining';
  });
  // One after another, so that it has work for a while whenever it hears the signal.
  const asked: Promise<PromiseSettledResult<number[]>[]>[] = [];
  const next = async (): Promise<void> => {
    asked.push(Promise.allSettled([ask('a', `last${asked.length}`, 100, prompt, patient)]));
    await vi.waitUntil(() => drains || worker('a', patient).load.waiting === 0, patience);
  };
  await next();
  const ended = a.signal('SIGTERM');
  while (!drains && asked.length < 1_000) await next();
  stop();
  expect(drains).toBe(true);
  await expect(ask('a', 'late', 8, prompt, patient)).rejects.toMatchObject({ code: 'DISCONNECTED', retry: true });
  const [first, ...others] = (await Promise.all(asked)).flat();
  const whole = { status: 'fulfilled', value: alone };
  const refused = { status: 'rejected', reason: expect.objectContaining({ code: 'DISCONNECTED', retry: true }) };
  expect(first).toEqual(whole);
  for (const other of others) expect(other).toEqual(other.status === 'fulfilled' ? whole : refused);
  expect(await ended).toBe(0);
  await until('a', 'silent', patient);
}, 120_000);

it('beyond a Unix socket with TLS: only who has a certificate of the right authority gets in', async () => {
  const at = (name: string): string => join(folder, name);
  const openssl = (...args: string[]): void => void execFileSync('openssl', args, { stdio: 'ignore' });
  const authority = (name: string): void => {
    const key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-keyout', at(`${name}.key`)];
    openssl('req', '-x509', ...key, '-days', '2', '-subj', `/CN=${name}`, '-out', at(`${name}.pem`));
  };
  const certify = (name: string, by: string): void => {
    const key = ['-newkey', 'ec', '-pkeyopt', 'ec_paramgen_curve:P-256', '-nodes', '-keyout', at(`${name}.key`)];
    openssl('req', ...key, '-subj', `/CN=${name}`, '-out', at(`${name}.csr`));
    writeFileSync(at('names'), 'subjectAltName=DNS:workers.example\n');
    const sign = [
      '-CA',
      at(`${by}.pem`),
      '-CAkey',
      at(`${by}.key`),
      '-CAcreateserial',
      '-days',
      '2',
      '-extfile',
      at('names'),
    ];
    openssl('x509', '-req', '-in', at(`${name}.csr`), ...sign, '-out', at(`${name}.pem`));
  };
  authority('ca');
  authority('other-ca');
  certify('worker', 'ca');
  certify('coordinator', 'ca');
  certify('stranger', 'other-ca');
  certify('secure', 'ca');
  const tls = { certFile: at('secure.pem'), keyFile: at('secure.key'), clientCaFile: at('ca.pem'), reloadMs: 20 };
  const secure = service('secure', { listen: '127.0.0.1:0', tls });
  await secure.start();
  const { address } = secure.ready[0] as { address: string };
  const files = (name: string, ca = 'ca', serverName: string | undefined = 'workers.example') => {
    const [cert, key, authorities] = [`${name}.pem`, `${name}.key`, `${ca}.pem`].map((file) => readFileSync(at(file)));
    return { cert: cert!, key: key!, ca: authorities!, serverName };
  };
  const describe = async (tlsFiles: ReturnType<typeof files> | undefined): Promise<string> => {
    const calls = new EngineCalls({ address, tls: tlsFiles });
    try {
      return (await calls.describe()).model;
    } catch (error) {
      return (error as { code: string }).code;
    } finally {
      calls.close();
    }
  };
  expect(await describe(files('coordinator'))).toBe('demo');
  expect(await describe(undefined)).toBe('DISCONNECTED');
  expect(await describe(files('stranger'))).toBe('DISCONNECTED');
  expect(await describe(files('coordinator', 'other-ca'))).toBe('DISCONNECTED');
  expect(await describe(files('coordinator', 'ca', 'elsewhere.example'))).toBe('DISCONNECTED');
  // Its files are renewed under it.
  certify('secure', 'other-ca');
  await vi.waitFor(async () => expect(await describe(files('coordinator', 'other-ca'))).toBe('demo'), patience);
  expect(await describe(files('coordinator'))).toBe('DISCONNECTED');
  await secure.signal('SIGTERM');

  const { ca, cert, key } = files('worker');
  const pod = new Pod('vllm', { ca, cert, key, requestCert: true, rejectUnauthorized: true });
  pod.token = 'secret';
  pod.answer = ({ response }) => void response.end('yes');
  await pod.start();
  const podState = async (access: Access | undefined): Promise<string> => {
    const asking = new Fleet({ logger: createLogger('fleet-test', 'silent'), ...(access && { access }) });
    const spoken = new SpokenDiscovery();
    await asking.start(spoken);
    spoken.say({ name: 'pod', kind: 'openai', address: pod.address });
    const found = asking.workers()[0]!;
    await vi.waitFor(() => expect(found.why ?? found.state).not.toBe('joining'), patience);
    let said = `${found.state} ${found.why ?? ''}`;
    if (found.state === 'ready') {
      const { body } = await asking.forward(0, '/v1/completions', {}, '{}', never);
      for await (const part of body) said += part.toString();
    }
    await asking.close();
    return said;
  };
  expect(await podState({ ...files('coordinator'), token: 'secret' })).toBe('ready yes');
  expect(await podState({ ...files('coordinator') })).toBe(
    'refused worker pod: /health answers 401; configure its token',
  );
  expect(await podState({ ...files('stranger'), token: 'secret' })).toMatch(
    /^joining worker pod: https:.* cannot be reached/,
  );
  expect(await podState(undefined)).toMatch(/^joining worker pod: https:.* cannot be reached/);
  await pod.stop();
  const open = service('open', { listen: '0.0.0.0:0' });
  await expect(open.start()).rejects.toThrow(
    'listen: 0.0.0.0:0 is beyond loopback; configure "tls", or listen on 127.0.0.1; correct it and start again',
  );
}, 120_000);
