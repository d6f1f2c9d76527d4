/**
 * The gateway's end of a stream, as Envoy plays it: it sends headers, body and trailers of a request and of its answer in each of the
 * modes, and keeps what it is told.
 */
import { type ChannelCredentials, type ClientDuplexStream, credentials, type ServiceError } from '@grpc/grpc-js';
import {
  type BodySendMode,
  ExternalProcessorClient,
  type HeaderMutation,
  type ProcessingRequest,
  type ProcessingResponse,
} from '@kvtier/wire/ext-proc';
import { channelOptions } from '@kvtier/wire/grpc';

export type Headers = Readonly<Record<string, string>>;
type Metadata = Readonly<Record<string, Readonly<Record<string, unknown>>>>;
type Part = NonNullable<ProcessingRequest['request']>;

export interface Opening {
  /** Told in the first message; undefined: this gateway does not say. */
  readonly modes?: { readonly request: BodySendMode; readonly response: BodySendMode };
  readonly metadata?: Metadata;
}

export class Gateway {
  readonly client: ExternalProcessorClient;

  constructor(address: string, channel: ChannelCredentials = credentials.createInsecure()) {
    // A connection of its own, as each gateway has.
    this.client = new ExternalProcessorClient(address, channel, {
      ...channelOptions,
      'grpc.use_local_subchannel_pool': 1,
    });
  }

  open(opening: Opening = {}): GatewayStream {
    return new GatewayStream(this.client.process(), opening);
  }

  close(): void {
    this.client.close();
  }
}

/** One HTTP request. */
export class GatewayStream {
  readonly call: ClientDuplexStream<ProcessingRequest, ProcessingResponse>;
  readonly responses: ProcessingResponse[] = [];
  /** How the stream ended: a status code; undefined while it is open. */
  ended: number | undefined;
  details = '';
  readonly #opening: Opening;
  #isFirst = true;
  #changed = (): void => {};

  constructor(call: ClientDuplexStream<ProcessingRequest, ProcessingResponse>, opening: Opening) {
    this.call = call;
    this.#opening = opening;
    call.on('data', (response: ProcessingResponse) => {
      this.responses.push(response);
      this.#changed();
    });
    call.on('error', () => {}); // its status says it
    call.on('status', ({ code, details }: ServiceError) => {
      this.ended = code;
      this.details = details;
      this.#changed();
    });
  }

  send(request: Part | undefined, metadata: Metadata | undefined = this.#opening.metadata): void {
    const { modes } = this.#opening;
    const isFirst = this.#isFirst;
    this.#isFirst = false;
    this.call.write({
      request,
      metadataContext: metadata && { filterMetadata: metadata as Record<string, Record<string, unknown>> },
      observabilityMode: false,
      protocolConfig:
        isFirst && modes
          ? {
              requestBodyMode: modes.request,
              responseBodyMode: modes.response,
              sendBodyWithoutWaitingForHeaderResponse: false,
            }
          : undefined,
    });
  }

  requestHeaders(headers: Headers, endOfStream = false): void {
    this.send({ $case: 'requestHeaders', value: { headers: headerMap(headers), endOfStream } });
  }

  post(path = '/v1/completions', headers: Headers = {}): void {
    this.requestHeaders({ ':method': 'POST', ':path': path, 'content-type': 'application/json', ...headers });
  }

  requestBody(body: string | Buffer, endOfStream = true): void {
    this.send({ $case: 'requestBody', value: { body: Buffer.from(body), endOfStream } });
  }

  requestTrailers(): void {
    this.send({ $case: 'requestTrailers', value: { trailers: headerMap({ 'x-end': '1' }) } });
  }

  /** `served`: by which endpoint. */
  responseHeaders(served: string, headers: Headers = { ':status': '200' }, endOfStream = false): void {
    this.send(
      { $case: 'responseHeaders', value: { headers: headerMap(headers), endOfStream } },
      served === '' ? undefined : { 'envoy.lb': { 'x-gateway-destination-endpoint-served': served } },
    );
  }

  responseBody(body: string | Buffer, endOfStream: boolean): void {
    this.send({ $case: 'responseBody', value: { body: Buffer.from(body), endOfStream } });
  }

  responseTrailers(): void {
    this.send({ $case: 'responseTrailers', value: { trailers: headerMap({ 'grpc-status': '0' }) } });
  }

  /** As Envoy, when the HTTP request has ended. */
  end(): void {
    this.call.end();
  }

  /** As Envoy, when its client has left. */
  cancel(): void {
    this.call.cancel();
  }

  /** Until `isSo` of what has come. */
  async until(isSo: (stream: this) => boolean): Promise<void> {
    while (!isSo(this)) {
      if (this.ended !== undefined) throw new Error(`the stream ended (${this.ended}) ${this.details}`);
      await new Promise<void>((resolve) => (this.#changed = resolve));
    }
  }

  /** The next `count` responses in all. */
  async has(count: number): Promise<readonly ProcessingResponse[]> {
    await this.until(({ responses }) => responses.length >= count);
    return this.responses;
  }

  async closed(): Promise<number> {
    while (this.ended === undefined) await new Promise<void>((resolve) => (this.#changed = resolve));
    return this.ended;
  }
}

const headerMap = (headers: Headers) => ({
  headers: Object.entries(headers).map(([key, value]) => ({ key, value: '', rawValue: Buffer.from(value) })),
});

/** What a response sets: headers as text, and the endpoint in the metadata. */
export function toldBy({ response, dynamicMetadata }: ProcessingResponse): {
  readonly part: string | undefined;
  readonly headers: Headers;
  /** Names of headers that it takes away. */
  readonly removed: readonly string[];
  readonly endpoint: unknown;
  readonly status: number | undefined;
} {
  const part = response?.$case;
  let mutation: HeaderMutation | undefined;
  if (part === 'immediateResponse') mutation = response!.value.headers;
  else if (part === 'requestTrailers' || part === 'responseTrailers') mutation = response!.value.headerMutation;
  else if (part !== undefined) mutation = response!.value.response?.headerMutation;
  return {
    part,
    headers: Object.fromEntries(
      (mutation?.setHeaders ?? []).map(({ header }) => [header!.key, header!.rawValue.toString()]),
    ),
    removed: mutation?.removeHeaders ?? [],
    endpoint: dynamicMetadata?.['envoy.lb']?.['x-gateway-destination-endpoint'],
    status: part === 'immediateResponse' ? response!.value.status?.code : undefined,
  };
}

/** The body that the gateway sends on, out of full duplex. */
export function sentOn(responses: readonly ProcessingResponse[], part: 'requestBody' | 'responseBody'): Buffer {
  return Buffer.concat(
    responses.flatMap(({ response }) => {
      if (response?.$case !== part) return [];
      const mutation = response.value.response?.bodyMutation?.mutation;
      return mutation?.$case === 'streamedResponse' ? [mutation.value.body] : [];
    }),
  );
}
