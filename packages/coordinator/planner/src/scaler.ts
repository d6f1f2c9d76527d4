/**
 * The planner as KEDA asks it (`externalscaler.ExternalScaler`): how many workers of a role the load needs, as a metric of which one replica
 * takes 1. A trigger names in its metadata:
 *
 *   role    prefill, decode, or all (default): both together, for workers of both roles
 *   model   as clients name it; may be left out while one model is served
 *
 * Invariants: what cannot be answered is a status, never a number (a number that is missing must not scale down), and what the metric is
 * called is answered always: without it KEDA scales by the CPU; streams are bounded; TLS wherever it is configured, and beyond loopback
 * always (base/config).
 */
import { type ServerWritableStream, status } from '@grpc/grpc-js';
import type { ScalerConfig } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import { type Logger, tellRenewed } from '@kvtier/telemetry';
import {
  type ExternalScalerServer,
  ExternalScalerService,
  type IsActiveResponse,
  type ScaledObjectRef,
} from '@kvtier/wire/external-scaler';
import { type RunningGrpcServer, startGrpcServer, TlsServerCredentials, toStatus, unary } from '@kvtier/wire/grpc';
import type { ModelPlan, Planner } from './planner.ts';

export interface ScalerOptions {
  readonly config: ScalerConfig;
  readonly planner: Pick<Planner, 'plans' | 'onPlan'>;
  readonly logger: Logger;
}

export interface ExternalScaler {
  /** "IP:PORT" with the port that was chosen for port 0. */
  readonly address: string;
  close(graceMs?: number): Promise<void>;
}

const roles = ['prefill', 'decode', 'all'] as const;
type Role = (typeof roles)[number];
const metricOf = (role: Role): string => `kvtier-${role}-workers`;
const maxRequestBytes = 64 << 10;
const maxNameChars = 200;
/** KEDA that has vanished without a word is found out. */
const keepalive = { 'grpc.keepalive_time_ms': 20_000, 'grpc.keepalive_timeout_ms': 10_000 };

/** @throws KvError CONFIG (TLS files), LOCKED (port taken), IO */
export async function startScaler({ config, planner, logger }: ScalerOptions): Promise<ExternalScaler> {
  let streams = 0;
  const handlers: ExternalScalerServer = {
    isActive: unary((ref) => ({ result: settled(planner, ref).isActive })),
    streamIsActive: (call) => {
      if (streams >= config.maxStreams) {
        const details = `scaler: ${config.maxStreams} streams are open; try again later`;
        call.emit('error', { code: status.RESOURCE_EXHAUSTED, details });
        return;
      }
      streams++;
      call.once('close', () => streams--);
      followActive(planner, call);
    },
    getMetricSpec: unary((ref) => {
      const metricName = metricOf(roleOf(ref));
      return { metricSpecs: [{ metricName, targetSize: 1n, targetSizeFloat: 1 }] };
    }),
    getMetrics: unary(({ scaledObjectRef, metricName }) => {
      const role = roleOf(scaledObjectRef);
      const plan = settled(planner, scaledObjectRef);
      // KEDA may put a number of the trigger in front.
      if (metricName !== '' && !metricName.endsWith(metricOf(role)))
        throw new KvError(
          'REQUEST',
          `scaler: ${cut(metricName)} is no metric of role ${role}; ask for ${metricOf(role)}`,
        );
      if (role !== 'prefill' && !plan.isDecodeKnown) throw unknownDecode(plan.model);
      const needed = neededOf(role, plan);
      const value = { metricName: metricOf(role), metricValue: BigInt(Math.ceil(needed)), metricValueFloat: needed };
      return { metricValues: [value] };
    }),
  };
  const tls =
    config.tls &&
    new TlsServerCredentials(config.tls, {
      place: 'planner.scaler.tls',
      reloadMs: config.tls.reloadMs,
      onProblem: tellRenewed(logger, 'scaler: TLS files'),
    });
  let server: RunningGrpcServer;
  try {
    const host = config.host.includes(':') ? `[${config.host}]` : config.host;
    server = await startGrpcServer(
      `${host}:${config.port}`,
      (grpc) => grpc.addService(ExternalScalerService, handlers),
      {
        ...(tls ? { credentials: tls } : {}),
        channel: {
          ...keepalive,
          'grpc.max_receive_message_length': maxRequestBytes,
          'grpc.max_concurrent_streams': config.maxStreams + 64,
        },
      },
    );
  } catch (error) {
    tls?.close();
    throw error;
  }
  return {
    address: server.address,
    close: async (graceMs) => {
      tls?.close();
      await server.close(graceMs);
    },
  };
}

/** Told as soon as it is known, and then at each change. What cannot be answered ends the stream. */
function followActive(
  planner: ScalerOptions['planner'],
  call: ServerWritableStream<ScaledObjectRef, IsActiveResponse>,
): void {
  let last: boolean | undefined;
  const tell = (): void => {
    try {
      const { isActive, isSettled } = planOf(planner, call.request);
      // One that reads nothing gets the newest word when it does.
      if (!isSettled || isActive === last || call.writableNeedDrain) return;
      last = isActive;
      call.write({ result: isActive });
    } catch (error) {
      stop();
      call.emit('error', toStatus(error));
    }
  };
  const stop = planner.onPlan(tell);
  call.once('close', stop);
  call.once('cancelled', stop);
  tell();
}

const wordOf = (ref: ScaledObjectRef | undefined, key: string): string | undefined => {
  const metadata = ref?.scalerMetadata ?? {};
  return Object.hasOwn(metadata, key) ? metadata[key] : undefined;
};

/** @throws KvError REQUEST: there is no such role */
function roleOf(ref: ScaledObjectRef | undefined): Role {
  const given = wordOf(ref, 'role') ?? 'all';
  const role = roles.find((one) => one === given);
  if (role !== undefined) return role;
  throw new KvError(
    'REQUEST',
    `scaler: role ${cut(given)} is none; write prefill, decode or all in the trigger's metadata`,
  );
}

/** @throws KvError as `planOf`; DISCONNECTED: it has been looked at for too short a time */
function settled(planner: ScalerOptions['planner'], ref: ScaledObjectRef | undefined): ModelPlan {
  const plan = planOf(planner, ref);
  if (plan.isSettled) return plan;
  const why = `model ${cut(plan.model)}: seen for too short a time to plan for it; ask again in a moment`;
  throw new KvError('DISCONNECTED', `scaler: ${why}`, { retry: true });
}

function unknownDecode(model: string): KvError {
  const why = `model ${cut(model)}: what a stream adds to a step is not known yet`;
  return new KvError('DISCONNECTED', `scaler: ${why}; ask again when its pods have had more streams, and fewer`, {
    retry: true,
  });
}

/** @throws KvError REQUEST: no such role, or of several models none is named; DISCONNECTED: no such model is served now */
function planOf(planner: ScalerOptions['planner'], ref: ScaledObjectRef | undefined): ModelPlan {
  roleOf(ref);
  const plans = planner.plans();
  const model = wordOf(ref, 'model');
  if (model === undefined && plans.length > 1)
    throw new KvError(
      'REQUEST',
      `scaler: ${plans.length} models are served; name one as model in the trigger's metadata`,
    );
  const plan = model === undefined ? plans[0] : plans.find((one) => one.model === model);
  if (plan !== undefined) return plan;
  const what = model === undefined ? 'no model' : `model ${cut(model)}: not`;
  throw new KvError('DISCONNECTED', `scaler: ${what} served now; keep a replica, or wait for one`, { retry: true });
}

function neededOf(role: Role, { prefill, decode }: ModelPlan): number {
  if (role === 'prefill') return prefill.needed;
  return role === 'decode' ? decode.needed : prefill.needed + decode.needed;
}

const cut = (text: string): string => JSON.stringify(text.slice(0, maxNameChars));
