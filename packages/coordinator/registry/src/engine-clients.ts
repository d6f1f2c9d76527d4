/**
 * gRPC clients of one engine worker, one after another: each has a connection of its own and is left before the worker's
 * HTTP/2 server would end it.
 *
 * That server counts calls that its client resets, and beyond 1,000 (and 33 a second) closes the connection with every call on
 * it (nghttp2's answer to CVE-2023-44487). Users who leave and stop strings reset calls.
 *
 * Invariant: calls of a connection that were reset, and those that still may be, are at most `maxAtRisk`; it shows the certificate that
 * its files hold. The next call opens another connection; the old one goes when its last call has ended.
 */
import type { ChannelOptions } from '@grpc/grpc-js';
import type { KvError } from '@kvtier/errors';
import { channelOptions, clientCredentials, EngineClient, type TlsFiles } from '@kvtier/wire/grpc';

const maxAtRisk = 800;

const options: ChannelOptions = {
  ...channelOptions,
  // A peer that vanished without a word is noticed, also while requests wait for tokens.
  'grpc.keepalive_time_ms': 15_000,
  'grpc.keepalive_timeout_ms': 15_000,
  // Else two clients of one address share a connection.
  'grpc.use_local_subchannel_pool': 1,
};

/** A client with its connection. */
export interface EngineConnection {
  readonly client: EngineClient;
  /** What it began with. */
  readonly tls: Pick<TlsFiles, 'ca' | 'cert' | 'key'> | undefined;
  running: number;
  resets: number;
}

export class EngineClients {
  readonly #address: string;
  readonly #tls: TlsFiles | undefined;
  #current: EngineConnection;
  #opened = 0;
  #refusal: KvError | undefined;

  /** `address`: "unix:/path" or "host:port". `tls` may hold other files from one call to the next. */
  constructor(address: string, tls?: TlsFiles) {
    this.#address = address;
    this.#tls = tls;
    this.#current = this.#open();
  }

  /** Connections so far, the present one included. */
  get opened(): number {
    return this.#opened;
  }

  /** Why the last server that was found there is none to talk to; undefined when the last call got through. */
  get refusal(): KvError | undefined {
    return this.#refusal;
  }

  /** For one call, which `end` is told the end of. */
  begin(): EngineConnection {
    const last = this.#current;
    if (last.resets + last.running >= maxAtRisk || !this.#isOfNow(last)) {
      this.#current = this.#open();
      this.#closeIfLeft(last);
    }
    this.#current.running++;
    return this.#current;
  }

  /** A server of ours answered. */
  answered(): void {
    this.#refusal = undefined;
  }

  /** `reset`: the call was cancelled before the engine had ended it. */
  end(connection: EngineConnection, reset: boolean): void {
    connection.running--;
    if (reset) connection.resets++;
    this.#closeIfLeft(connection);
  }

  /** The next call gets another connection: this one may be to somebody who is gone without a word. */
  renew(): void {
    const last = this.#current;
    this.#current = this.#open();
    this.#closeIfLeft(last);
  }

  /** Not while calls run: those that the library has not started yet would fail. */
  #closeIfLeft(connection: EngineConnection): void {
    if (connection !== this.#current && connection.running === 0) connection.client.close();
  }

  close(): void {
    this.#current.client.close();
  }

  /** Its library would go on with the files that it began with: a certificate has an end. */
  #isOfNow({ tls }: EngineConnection): boolean {
    return tls?.ca === this.#tls?.ca && tls?.cert === this.#tls?.cert && tls?.key === this.#tls?.key;
  }

  #open(): EngineConnection {
    this.#opened++;
    const credentials = clientCredentials(this.#address, (why) => (this.#refusal = why), this.#tls);
    const { serverName } = this.#tls ?? {};
    const named = serverName === undefined ? options : { ...options, 'grpc.ssl_target_name_override': serverName };
    const tls = this.#tls && { ca: this.#tls.ca, cert: this.#tls.cert, key: this.#tls.key };
    return { client: new EngineClient(this.#address, credentials, named), tls, running: 0, resets: 0 };
  }
}
