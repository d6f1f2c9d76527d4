/**
 * gRPC's health protocol by the names that gateways and llm-d's charts ask for: `liveness` while we answer at all; `readiness`, the
 * service itself and '' while we can choose.
 */
import { type ServerWritableStream, status } from '@grpc/grpc-js';
import { KvError } from '@kvtier/errors';
import {
  type HealthCheckRequest,
  type HealthCheckResponse,
  type HealthServer,
  ServingStatus,
} from '@kvtier/wire/ext-proc';
import { toStatus } from '@kvtier/wire/grpc';

const lookMs = 200;
const maxWatchers = 1_024;
const byReadiness = new Set(['', 'readiness', 'envoy.service.ext_proc.v3.ExternalProcessor']);

type Watcher = ServerWritableStream<HealthCheckRequest, HealthCheckResponse>;

export class Health {
  readonly #isReady: () => boolean;
  readonly #watchers = new Map<Watcher, ServingStatus>();
  readonly #timer: NodeJS.Timeout;
  #closing = false;

  /** `isReady` is asked again and again; it takes no time. */
  constructor(isReady: () => boolean) {
    this.#isReady = isReady;
    this.#timer = setInterval(() => this.#look(), lookMs);
    this.#timer.unref();
  }

  readonly handlers: HealthServer = {
    check: ({ request: { service } }, callback) => {
      const known = this.#statusOf(service);
      if (known === ServingStatus.SERVICE_UNKNOWN) {
        callback({ code: status.NOT_FOUND, details: 'no such service; ask for liveness or readiness' });
      } else callback(null, { status: known });
    },
    watch: (call: Watcher) => {
      if (this.#watchers.size >= maxWatchers || this.#closing) {
        call.emit('error', toStatus(new KvError('BUSY', `health: ${maxWatchers} watch already; use Check`)));
        return;
      }
      const now = this.#statusOf(call.request.service);
      this.#watchers.set(call, now);
      call.once('cancelled', () => this.#watchers.delete(call));
      call.once('error', () => this.#watchers.delete(call));
      call.write({ status: now });
    },
  };

  /** Not ready any more; those who watch are told, and let go. */
  close(): void {
    this.#closing = true;
    clearInterval(this.#timer);
    this.#look();
    for (const call of this.#watchers.keys()) call.end();
    this.#watchers.clear();
  }

  #look(): void {
    for (const [call, told] of this.#watchers) {
      const now = this.#statusOf(call.request.service);
      if (now === told || call.writableNeedDrain) continue;
      this.#watchers.set(call, now);
      call.write({ status: now });
    }
  }

  #statusOf(service: string): ServingStatus {
    if (service === 'liveness') return ServingStatus.SERVING;
    if (!byReadiness.has(service)) return ServingStatus.SERVICE_UNKNOWN;
    return !this.#closing && this.#isReady() ? ServingStatus.SERVING : ServingStatus.NOT_SERVING;
  }
}
