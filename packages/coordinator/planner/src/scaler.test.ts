/** The scaler over a real connection, KEDA's part played by a client of its protocol. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { credentials, Metadata, type ServiceError, status } from '@grpc/grpc-js';
import { plannerSchema } from '@kvtier/config';
import { ownCertificate } from '@kvtier/config/testing';
import { createLogger } from '@kvtier/telemetry';
import { ExternalScalerClient, type IsActiveResponse, type ScaledObjectRef } from '@kvtier/wire/external-scaler';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import type { ModelPlan } from './planner.ts';
import { type ExternalScaler, startScaler } from './scaler.ts';

const role = (needed: number) => ({
  ...{ demandTokensPerS: 1, rateTokensPerS: 1, isReachable: true },
  ...{ needed, workers: Math.ceil(needed) },
});
const planOf = (
  model: string,
  prefill: number,
  decode: number,
  isActive = true,
  isSettled = true,
  isDecodeKnown = true,
): ModelPlan => ({
  model,
  prefill: role(prefill),
  decode: role(decode),
  load: { requestsPerS: 1, promptTokensPerS: 1, hitRatio: 0, outputTokensPerS: 1 },
  rates: { prefillTokensPerS: 1, stepS: 1, stepPerRequestS: 0, streams: 1, maxStreams: 1 },
  ...{ isActive, isSettled, isDecodeKnown },
  present: { prefill: 0, decode: 0, mixed: 1 },
});
const ref = (scalerMetadata: Record<string, string> = {}): ScaledObjectRef => ({
  name: 'o',
  namespace: 'n',
  scalerMetadata,
});

let plans: ModelPlan[];
let listeners: Set<() => void>;
let scaler: ExternalScaler;
let keda: ExternalScalerClient;
const start = (more: object = {}) =>
  startScaler({
    config: plannerSchema.parse({ scaler: { port: 0, ...more } }).scaler!,
    planner: {
      plans: () => plans,
      onPlan: (listener) => {
        listeners.add(listener);
        return () => listeners.delete(listener);
      },
    },
    logger: createLogger('test', 'silent'),
  });
beforeEach(async () => {
  plans = [planOf('m', 1.25, 2.5)];
  listeners = new Set();
  scaler = await start({ maxStreams: 2 });
  keda = new ExternalScalerClient(scaler.address, credentials.createInsecure());
});
afterEach(async () => {
  keda.close();
  await scaler.close(0);
});

type Call<Request, Response> = (
  request: Request,
  told: (error: ServiceError | null, response: Response) => void,
) => unknown;
const ask = <Request, Response>(call: Call<Request, Response>, request: Request): Promise<Response> =>
  new Promise((resolve, reject) => call.call(keda, request, (error, told) => (error ? reject(error) : resolve(told))));
const spec = (metadata?: Record<string, string>) => ask(keda.getMetricSpec, ref(metadata));
const metrics = (metadata?: Record<string, string>, metricName = '') =>
  ask(keda.getMetrics, { scaledObjectRef: ref(metadata), metricName });

it.each([
  [{ role: 'prefill' }, 'kvtier-prefill-workers', 2n, 1.25],
  [{ role: 'decode', model: 'm' }, 'kvtier-decode-workers', 3n, 2.5],
  [{}, 'kvtier-all-workers', 4n, 3.75],
])('%j: one replica takes 1 of %s', async (metadata, metricName, metricValue, metricValueFloat) => {
  expect(await spec(metadata)).toEqual({ metricSpecs: [{ metricName, targetSize: 1n, targetSizeFloat: 1 }] });
  const value = { metricValues: [{ metricName, metricValue, metricValueFloat }] };
  for (const name of ['', metricName, `s0-${metricName}`]) expect(await metrics(metadata, name)).toEqual(value);
  expect(await ask(keda.isActive, ref(metadata))).toEqual({ result: true });
});

describe('what cannot be answered is a status and no number', () => {
  it.each<[string, Record<string, string>, number, RegExp]>([
    ['another role', { role: 'cook' }, status.INVALID_ARGUMENT, /role "cook" is none/],
    ['no name of what all objects have', { role: 'toString' }, status.INVALID_ARGUMENT, /is none/],
  ])('%s', async (_, metadata, code, details) => {
    for (const call of [spec(metadata), metrics(metadata), ask(keda.isActive, ref(metadata))])
      await expect(call).rejects.toMatchObject({ code, details: expect.stringMatching(details) });
  });

  it.each<[string, () => void, Record<string, string>, RegExp]>([
    ['another model', () => {}, { model: 'x' }, /model "x": not served now/],
    ['nobody is ready', () => (plans.length = 0), {}, /no model served now/],
    ['looked at for a moment', () => (plans = [planOf('m', 0, 0, false, false)]), {}, /model "m": seen for too short/],
  ])('%s; but the metric has its name', async (_, become, metadata, details) => {
    become();
    for (const call of [metrics(metadata), ask(keda.isActive, ref(metadata))])
      await expect(call).rejects.toMatchObject({ code: status.UNAVAILABLE, details: expect.stringMatching(details) });
    expect(await spec({ ...metadata, role: 'decode' })).toMatchObject({
      metricSpecs: [{ metricName: 'kvtier-decode-workers' }],
    });
  });

  it('what one worker gives is not known; of prefill it is', async () => {
    plans = [planOf('m', 1.25, 2.5, true, true, false)];
    for (const role of ['decode', 'all'])
      await expect(metrics({ role })).rejects.toMatchObject({
        code: status.UNAVAILABLE,
        details: expect.stringMatching(/model "m": what a stream adds to a step is not known yet/),
      });
    expect(await metrics({ role: 'prefill' })).toMatchObject({ metricValues: [{ metricValueFloat: 1.25 }] });
    expect(await ask(keda.isActive, ref())).toEqual({ result: true });
  });

  it('of several models one has to be named, of none nothing is known, and a metric is one of ours', async () => {
    await expect(metrics({ role: 'prefill' }, 'kvtier-decode-workers')).rejects.toMatchObject({
      code: status.INVALID_ARGUMENT,
    });
    plans.push(planOf('n', 9, 9));
    await expect(metrics()).rejects.toMatchObject({ code: status.INVALID_ARGUMENT });
    expect(await metrics({ model: 'n', role: 'prefill' })).toMatchObject({ metricValues: [{ metricValueFloat: 9 }] });
    plans.length = 0;
    await expect(metrics()).rejects.toMatchObject({ code: status.UNAVAILABLE });
  });
});

it('a stream is told at once and at each change, ends with a status, and there are so many at most', async () => {
  plans = [planOf('m', 0, 0, false, false)];
  const call = keda.streamIsActive(ref({ model: 'm' }));
  const told: boolean[] = [];
  let changed = (): void => {};
  call.on('data', ({ result }: IsActiveResponse) => {
    told.push(result);
    changed();
  });
  const failed = new Promise<ServiceError>((resolve) => call.on('error', (error: ServiceError) => resolve(error)));
  const until = async (length: number): Promise<void> => {
    while (told.length < length) await new Promise<void>((resolve) => (changed = resolve));
  };
  const tell = (...now: ModelPlan[]): void => {
    plans = now;
    for (const listener of listeners) listener();
  };
  // What has been looked at for a moment is not told, and ends nothing.
  while (listeners.size === 0) await new Promise(setImmediate);
  tell(planOf('m', 1, 1, true));
  await until(1);
  tell(planOf('m', 1, 1, true));
  tell(planOf('m', 0, 0, false));
  await until(2);
  tell(planOf('m', 1, 1, true));
  await until(3);
  expect(told).toEqual([true, false, true]);

  const second = keda.streamIsActive(ref());
  await new Promise((resolve) => second.once('data', resolve));
  second.on('error', () => {});
  const third = keda.streamIsActive(ref());
  const refused = await new Promise<ServiceError>((resolve) => third.once('error', resolve as (error: Error) => void));
  expect(refused.code).toBe(status.RESOURCE_EXHAUSTED);
  second.cancel();
  while (listeners.size > 1) await new Promise(setImmediate);
  tell();
  expect((await failed).code).toBe(status.UNAVAILABLE);
  while (listeners.size > 0) await new Promise(setImmediate);
});

it('beyond loopback only with TLS, and a certificate of who asks', () => {
  const parse = (more: object) => () => plannerSchema.parse({ scaler: { host: '0.0.0.0', ...more } });
  expect(parse({})).toThrow(/not loopback: name certFile and keyFile/);
  expect(parse({ tls: { certFile: 'a', keyFile: 'b' } })).toThrow(/name KEDA's authority/);
  expect(parse({ tls: { certFile: 'a', keyFile: 'b' }, trustedNetwork: true })).not.toThrow();
  expect(parse({ tls: { certFile: 'a', keyFile: 'b', clientCaFile: 'c' } })).not.toThrow();
});

it('with TLS it answers who shows a certificate of its authority, and nobody else', async () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-scaler-'));
  const at = (name: string): string => join(folder, name);
  const bytes = (name: string): Buffer => readFileSync(at(name));
  for (const name of ['server', 'keda', 'stranger']) ownCertificate(folder, name);
  const tls = { certFile: at('server.pem'), keyFile: at('server.key'), clientCaFile: at('keda.pem') };
  const closed = await start({ tls });
  try {
    const askAs = (name: string): Promise<unknown> => {
      const shown = credentials.createSsl(bytes('server.pem'), bytes(`${name}.key`), bytes(`${name}.pem`));
      const client = new ExternalScalerClient(closed.address, shown);
      return new Promise((resolve, reject) =>
        client.isActive(ref(), new Metadata(), { deadline: Date.now() + 5_000 }, (error, told) =>
          error ? reject(error) : resolve(told),
        ),
      ).finally(() => client.close());
    };
    expect(await askAs('keda')).toEqual({ result: true });
    await expect(askAs('stranger')).rejects.toMatchObject({ code: status.UNAVAILABLE });
  } finally {
    await closed.close(0);
    rmSync(folder, { recursive: true });
  }
});
