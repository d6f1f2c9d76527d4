/**
 * The endpoint picker: Envoy's `ext_proc` in front of Dispatch, so that any Inference Gateway (Gateway API Inference Extension, llm-d)
 * sends requests where this coordinator would. It only picks: the gateway carries request and answer to the pod by itself.
 *
 *   gateway ─ext_proc, one stream a request─► Conversation ─► Picker ─► BodyReader, Dispatch
 *   probes  ─grpc.health.v1─► Health
 *
 * Invariants: TLS wherever it is configured, and beyond loopback always (base/config); streams, bytes and waits are bounded; nothing that
 * a gateway sends throws past its own stream; when it closes, it is unhealthy first.
 */
import { type Server, ServerCredentials, status } from '@grpc/grpc-js';
import type { EndpointPickerConfig } from '@kvtier/config';
import type { Dispatch } from '@kvtier/dispatch';
import type { PodHandOff } from '@kvtier/pod-handoff';
import type { Worker } from '@kvtier/registry';
import { type Logger, tellRenewed } from '@kvtier/telemetry';
import {
  BodySendMode,
  boundedExternalProcessorService,
  HealthService,
  maxBesideBodyBytes,
} from '@kvtier/wire/ext-proc';
import { type RunningGrpcServer, startGrpcServer, TlsServerCredentials } from '@kvtier/wire/grpc';
import { Conversation, type ConversationParts } from './conversation.ts';
import { Health } from './health.ts';
import { HeldBytes } from './held-bytes.ts';
import { PickerMetrics } from './metrics.ts';
import type { ProcessCall } from './outgoing.ts';
import { type BodyReader, type Deadlines, type Outcomes, Picker } from './picker.ts';

export interface EndpointPickerOptions {
  readonly config: EndpointPickerConfig;
  readonly dispatch: Dispatch;
  /** As `Fleet.workers`: by number. */
  readonly workers: () => readonly (Worker | undefined)[];
  /** Is told what becomes of requests at pods; as `Fleet`. */
  readonly outcomes: Outcomes;
  /** Reads bodies of requests, in threads. */
  readonly reader: BodyReader;
  /** Prefill and decode apart; undefined: the gateway's pods all do both. */
  readonly pods?: PodHandOff | undefined;
  /** Which requests would be answered too late, and the target of those that name none. */
  readonly inTime: Deadlines;
  readonly ttftMs?: number | undefined;
  /** Whether the members are known, so that gateways may ask; takes no time. */
  readonly isReady: () => boolean;
  readonly logger: Logger;
}

export interface EndpointPicker {
  /** "IP:PORT" with the port that was chosen for port 0. */
  readonly address: string;
  readonly healthAddress: string | undefined;
  /** In Prometheus' text form. */
  metrics(): Promise<string>;
  /** Not healthy from now on; streams that are open get `graceMs`, then they are cut. */
  close(graceMs?: number): Promise<void>;
}

const bodyModes = {
  fullDuplex: BodySendMode.FULL_DUPLEX_STREAMED,
  buffered: BodySendMode.BUFFERED,
  none: BodySendMode.NONE,
} as const;

/**
 * Of one message, whatever `bodyBytes` is: a gateway that buffers sends a body as one, and one that is too large to be read is to be routed
 * all the same. Of no more: a message is joined in one turn, before anybody here sees it.
 */
const mostMessageBodyBytes = 16 << 20;

/** A gateway that has vanished without a word is found out, and its streams end. */
const keepalive = { 'grpc.keepalive_time_ms': 20_000, 'grpc.keepalive_timeout_ms': 10_000 };

/** @throws KvError CONFIG (TLS files), LOCKED (port taken), IO */
export async function startEndpointPicker(options: EndpointPickerOptions): Promise<EndpointPicker> {
  const { config, dispatch, workers, outcomes, reader, pods, inTime, ttftMs, isReady, logger } = options;
  const metrics = new PickerMetrics();
  const parts: ConversationParts = {
    picker: new Picker({
      dispatch,
      workers,
      outcomes,
      reader,
      pods,
      inTime,
      ttftMs,
      metrics,
      logger,
      fallbacks: config.fallbacks,
    }),
    metrics,
    held: new HeldBytes(config.heldBytes, (bytes) => metrics.heldBytes.set(bytes)),
    limits: config,
    bodyMode: bodyModes[config.bodyMode],
    onDefect: (id, error) => logger.error({ request: id, err: error }, 'endpoint picker: a request failed'),
  };
  const health = new Health(isReady);
  let streams = 0;
  const process = (call: ProcessCall): void => {
    if (streams >= config.maxStreams) {
      const details = `endpoint picker: ${config.maxStreams} requests are open; try again later`;
      call.emit('error', { code: status.RESOURCE_EXHAUSTED, details });
      return;
    }
    metrics.streams.set(++streams);
    call.once('close', () => metrics.streams.set(--streams));
    new Conversation(call, parts);
  };
  const tls =
    config.tls &&
    new TlsServerCredentials(config.tls, {
      place: 'endpointPicker.tls',
      reloadMs: config.tls.reloadMs,
      onProblem: tellRenewed(logger, 'endpoint picker: TLS files'),
    });
  const running: RunningGrpcServer[] = [];
  const close = async (graceMs = 2_000): Promise<void> => {
    health.close();
    tls?.close();
    await Promise.all(running.map((server) => server.close(graceMs)));
  };
  try {
    const server = await startGrpcServer(
      addressOf(config),
      (grpc) => {
        grpc.addService(boundedExternalProcessorService, { process });
        grpc.addService(HealthService, health.handlers);
      },
      {
        ...(tls ? { credentials: tls } : {}),
        channel: {
          ...keepalive,
          'grpc.max_receive_message_length': Math.max(config.bodyBytes, mostMessageBodyBytes) + maxBesideBodyBytes,
          'grpc.max_concurrent_streams': config.maxStreams,
        },
      },
    );
    running.push(server);
    if (config.health !== null) {
      const address = addressOf(config.health);
      const addHealth = (grpc: Server): unknown => grpc.addService(HealthService, health.handlers);
      // Probes speak plain text; that the network is trusted beyond loopback the configuration has made sure of.
      const credentials = ServerCredentials.createInsecure();
      running.push(await startGrpcServer(address, addHealth, { credentials }));
    }
    return { address: server.address, healthAddress: running[1]?.address, metrics: () => metrics.text(), close };
  } catch (error) {
    await close(0);
    throw error;
  }
}

const addressOf = ({ host, port }: { readonly host: string; readonly port: number }): string =>
  `${host.includes(':') ? `[${host}]` : host}:${port}`;
