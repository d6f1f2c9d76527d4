/** gRPC health over real connections: on a port of its own and where gateways ask; how it follows readiness and the end. */
import { credentials, type ServiceError, status } from '@grpc/grpc-js';
import { type EndpointPickerInput, endpointPickerSchema } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { createLogger } from '@kvtier/telemetry';
import { type HealthCheckResponse, HealthClient, ServingStatus } from '@kvtier/wire/ext-proc';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { type EndpointPicker, startEndpointPicker } from './index.ts';
import { ScriptedDispatch } from './testing/index.ts';

type HealthInput = NonNullable<EndpointPickerInput['health']>;

let picker: EndpointPicker;
let client: HealthClient;
let isReady = false;
const start = (port: number, healthPort: number, beyond: Pick<HealthInput, 'host' | 'trustedNetwork'> = {}) =>
  startEndpointPicker({
    config: endpointPickerSchema.parse({ port, health: { port: healthPort, ...beyond } }),
    dispatch: new ScriptedDispatch([]),
    reader: { read: () => Promise.reject(new KvError('REQUEST', 'no')) },
    workers: () => [],
    outcomes: { went: () => {}, heard: () => {}, succeeded: () => {}, failed: () => {}, doubted: () => {} },
    inTime: { admit: () => {}, came: () => {} },
    isReady: () => isReady,
    logger: createLogger('test', 'silent'),
  });
beforeEach(async () => {
  isReady = false;
  picker = await start(0, 0);
  client = new HealthClient(picker.healthAddress!, credentials.createInsecure());
});
afterEach(async () => {
  client.close();
  await picker.close(0);
});

const ask = (service: string, of = client): Promise<number> =>
  new Promise((resolve, reject) =>
    of.check({ service }, (error: ServiceError | null, answer) => (error ? reject(error) : resolve(answer.status))),
  );

it('liveness at once, readiness and the service when members are known, others not found', async () => {
  const readiness = ['', 'readiness', 'envoy.service.ext_proc.v3.ExternalProcessor'];
  expect(await ask('liveness')).toBe(ServingStatus.SERVING);
  for (const service of readiness) expect(await ask(service)).toBe(ServingStatus.NOT_SERVING);
  isReady = true;
  const gateways = new HealthClient(picker.address, credentials.createInsecure());
  for (const service of readiness) {
    expect(await ask(service)).toBe(ServingStatus.SERVING);
    expect(await ask(service, gateways)).toBe(ServingStatus.SERVING);
  }
  gateways.close();
  await expect(ask('other')).rejects.toMatchObject({ code: status.NOT_FOUND });
});

it('who watches is told of each change, and of the end', async () => {
  const call = client.watch({ service: 'readiness' });
  const told: number[] = [];
  let changed = (): void => {};
  const until = async (count: number): Promise<void> => {
    while (told.length < count) await new Promise<void>((resolve) => (changed = resolve));
  };
  call.on('data', (answer: HealthCheckResponse) => {
    told.push(answer.status);
    changed();
  });
  const ended = new Promise<number>((resolve) => call.on('status', ({ code }) => resolve(code)));
  call.on('error', () => {});
  const unknown = client.watch({ service: 'other' });
  unknown.on('error', () => {});
  const first = await new Promise<HealthCheckResponse>((resolve) => unknown.once('data', resolve));
  expect(first.status).toBe(ServingStatus.SERVICE_UNKNOWN);
  unknown.cancel();
  await until(1);
  isReady = true;
  await until(2);
  void picker.close();
  expect(await ended).toBe(status.OK);
  expect(told).toEqual([ServingStatus.NOT_SERVING, ServingStatus.SERVING, ServingStatus.NOT_SERVING]);
});

it('on a network that is said to be trusted it listens for probes from everywhere, in plain text', async () => {
  const open = await start(0, 0, { host: '0.0.0.0', trustedNetwork: true });
  try {
    const [host, port] = open.healthAddress!.split(':');
    expect(host).toBe('0.0.0.0');
    const probe = new HealthClient(`127.0.0.1:${port}`, credentials.createInsecure());
    expect(await ask('liveness', probe)).toBe(ServingStatus.SERVING);
    probe.close();
  } finally {
    await open.close(0);
  }
});

it('a port that is taken is one line, and leaves nothing open', async () => {
  const taken = Number(picker.healthAddress!.split(':').at(-1));
  await expect(start(0, taken)).rejects.toMatchObject({ code: 'LOCKED' });
});
