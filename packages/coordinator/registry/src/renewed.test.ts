/** Certificates of ours that are renewed under the coordinator: the next connection to a worker shows the new ones. */
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { WorkerAccess, workerAccessSchema } from '@kvtier/config';
import { ownCertificate, renew } from '@kvtier/config/testing';
import { createLogger } from '@kvtier/telemetry';
import { EngineService, startGrpcServer, type TlsFiles, TlsServerCredentials, unary } from '@kvtier/wire/grpc';
import { afterAll, beforeAll, beforeEach, expect, it, vi } from 'vitest';
import { EngineCalls } from './engine-calls.ts';
import { Fleet } from './fleet.ts';
import { Pod, SpokenDiscovery } from './testing/index.ts';

const patience = { timeout: 20_000, interval: 5 };
let folder: string;
const at = (name: string): string => join(folder, name);
const bytes = (name: string): Buffer => readFileSync(at(name));
beforeAll(() => {
  folder = mkdtempSync(join(tmpdir(), 'kvtier-renewed-'));
  for (const name of ['worker', 'first', 'second']) ownCertificate(folder, name);
});
afterAll(() => rmSync(folder, { recursive: true }));

const use = (name: string): void => {
  for (const kind of ['pem', 'key']) renew(folder, `${name}.${kind}`, `our.${kind}`);
};
const accessOf = (): WorkerAccess =>
  new WorkerAccess(
    workerAccessSchema.parse({
      ...{ caFile: at('worker.pem'), certFile: at('our.pem'), keyFile: at('our.key'), reloadMs: 60_000 },
    }),
    () => {},
  );
let access: WorkerAccess;
beforeEach(() => {
  use('first');
  access = accessOf();
});

it('to an engine worker: an open connection stays until there is a new one, for calls that begin then', async () => {
  renew(folder, 'first.pem', 'let-in.pem');
  const files = { certFile: at('worker.pem'), keyFile: at('worker.key'), clientCaFile: at('let-in.pem') };
  const credentials = new TlsServerCredentials(files, { place: 'tls', reloadMs: 60_000, onProblem: () => {} });
  const metrics = { metrics: unary(() => ({ prometheus: 'served' })) };
  const add = (grpc: Parameters<Parameters<typeof startGrpcServer>[1]>[0]): void =>
    grpc.addService(EngineService, metrics as never);
  const server = await startGrpcServer('127.0.0.1:0', add, { credentials });
  const calls = new EngineCalls({ address: server.address, tls: access as TlsFiles });
  expect([await calls.metrics(), calls.connections]).toEqual(['served', 1]);
  // From now on the worker lets in the second one alone.
  renew(folder, 'second.pem', 'let-in.pem');
  await credentials.reload();
  expect([await calls.metrics(), calls.connections]).toEqual(['served', 1]);
  const late = new EngineCalls({ address: server.address, tls: access as TlsFiles });
  await expect(late.metrics()).rejects.toMatchObject({ code: 'DISCONNECTED' });
  use('second');
  await access.reload();
  expect([await calls.metrics(), calls.connections]).toEqual(['served', 2]);
  expect([await late.metrics(), late.connections]).toEqual(['served', 2]);
  for (const each of [calls, late, access, credentials]) each.close();
  await server.close(0);
});

it('to a pod: one that lets in the new one alone is reached', async () => {
  const tls = { cert: bytes('worker.pem'), key: bytes('worker.key'), ca: bytes('second.pem') };
  const pod = new Pod('vllm', { ...tls, requestCert: true, rejectUnauthorized: true });
  pod.answer = ({ response }) => void response.end('yes');
  await pod.start();
  const fleet = new Fleet({ logger: createLogger('registry-test', 'silent'), access });
  const discovery = new SpokenDiscovery();
  await fleet.start(discovery);
  discovery.say({ name: 'pod', kind: 'openai', address: pod.address });
  await vi.waitUntil(() => fleet.workers()[0]!.why?.includes('cannot be reached'), patience);
  use('second');
  await access.reload();
  await vi.waitUntil(() => fleet.workers()[0]!.state === 'ready', patience);
  const { body } = await fleet.forward(0, '/v1/completions', {}, '{}', new AbortController().signal);
  const parts: Buffer[] = [];
  for await (const part of body) parts.push(part);
  expect(Buffer.concat(parts).toString()).toBe('yes');
  await fleet.close();
  await pod.stop();
  access.close();
});
