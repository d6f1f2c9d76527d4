/**
 * Our ext_proc messages are Envoy's, byte for byte. The bytes were made from Envoy's own files (as @grpc/grpc-js-xds 1.14.0 carries them)
 * with protobufjs; those of full duplex, which are newer than these files, are written out by hand.
 */
import fc from 'fast-check';
import { describe, expect, it } from 'vitest';
import {
  AppendAction,
  BodySendMode,
  boundedExternalProcessorService,
  decodeProcessingRequest,
  HealthCheckRequest,
  HealthCheckResponse,
  maxBesideBodyBytes,
  ProcessingRequest,
  ProcessingResponse,
  ServingStatus,
} from './ext-proc.ts';

const none = { metadataContext: undefined, observabilityMode: false, protocolConfig: undefined };
const common = { status: 0, headerMutation: undefined, bodyMutation: undefined, clearRouteCache: false } as const;
const raw = (key: string, value: string) => ({ key, value: '', rawValue: Buffer.from(value) });
const set = (key: string, value: string) => ({
  setHeaders: [{ header: raw(key, value), appendAction: AppendAction.OVERWRITE_IF_EXISTS_OR_ADD }],
  removeHeaders: [],
});
const key = 'x-gateway-destination-endpoint';

const requests: Readonly<Record<string, readonly [ProcessingRequest, hex: string]>> = {
  'request headers with a subset': [
    {
      ...none,
      request: {
        $case: 'requestHeaders',
        value: {
          headers: { headers: [raw(':path', '/v1'), { key: 'a', value: 'b', rawValue: Buffer.alloc(0) }] },
          endOfStream: true,
        },
      },
      metadataContext: { filterMetadata: { 'envoy.lb.subset_hint': { [`${key}-subset`]: ['10.0.0.1:80'] } } },
    },
    '121a0a160a0c0a053a706174681a032f76310a060a0161120162180142560a540a14656e766f792e6c622e7375627365745f68696e74123c0a3a0a25' +
      '782d676174657761792d64657374696e6174696f6e2d656e64706f696e742d7375627365741211320f0a0d1a0b31302e302e302e313a3830',
  ],
  'response headers, observed': [
    {
      ...none,
      request: {
        $case: 'responseHeaders',
        value: { headers: { headers: [raw(':status', '200')] }, endOfStream: false },
      },
      observabilityMode: true,
    },
    '1a120a100a0e0a073a7374617475731a033230305001',
  ],
  'a request body': [
    { ...none, request: { $case: 'requestBody', value: { body: Buffer.from('{}'), endOfStream: true } } },
    '22060a027b7d1001',
  ],
  'a response body': [
    { ...none, request: { $case: 'responseBody', value: { body: Buffer.from('x'), endOfStream: false } } },
    '2a030a0178',
  ],
  'request trailers': [
    { ...none, request: { $case: 'requestTrailers', value: { trailers: { headers: [raw('t', '1')] } } } },
    '320a0a080a060a01741a0131',
  ],
  'response trailers': [{ ...none, request: { $case: 'responseTrailers', value: { trailers: undefined } } }, '3a00'],
  'how bodies are sent': [
    {
      ...none,
      request: { $case: 'requestBody', value: { body: Buffer.from('x'), endOfStream: false } },
      protocolConfig: {
        requestBodyMode: BodySendMode.FULL_DUPLEX_STREAMED,
        responseBodyMode: BodySendMode.BUFFERED,
        sendBodyWithoutWaitingForHeaderResponse: true,
      },
    },
    '22030a01785a06080410021801',
  ],
};

const answer = { dynamicMetadata: undefined };
const responses: Readonly<Record<string, readonly [ProcessingResponse, hex: string]>> = {
  'headers with the endpoint': [
    {
      response: {
        $case: 'requestHeaders',
        value: { response: { ...common, headerMutation: set(key, '10.0.0.1:80'), clearRouteCache: true } },
      },
      dynamicMetadata: { 'envoy.lb': { [key]: '10.0.0.1:80' } },
    },
    '0a390a3712330a310a2d0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e741a0b31302e302e302e313a383018022801' +
      '42410a3f0a08656e766f792e6c6212332a310a2f0a1e782d676174657761792d64657374696e6174696f6e2d656e64706f696e74120d1a0b3130' +
      '2e302e302e313a3830',
  ],
  'response headers go on': [
    { ...answer, response: { $case: 'responseHeaders', value: { response: common } } },
    '12020a00',
  ],
  'a request body goes on': [
    { ...answer, response: { $case: 'requestBody', value: { response: common } } },
    '1a020a00',
  ],
  'a response body goes on': [
    { ...answer, response: { $case: 'responseBody', value: { response: common } } },
    '22020a00',
  ],
  'request trailers go on': [
    { ...answer, response: { $case: 'requestTrailers', value: { headerMutation: undefined } } },
    '2a00',
  ],
  'response trailers go on': [
    { ...answer, response: { $case: 'responseTrailers', value: { headerMutation: undefined } } },
    '3200',
  ],
  'an answer at once': [
    {
      ...answer,
      response: {
        $case: 'immediateResponse',
        value: { status: { code: 429 }, headers: set('retry-after', '1'), body: Buffer.from('{}'), details: 'why' },
      },
    },
    '3a260a0308ad0312160a140a100a0b72657472792d61667465721a013118021a027b7d2a03776879',
  ],
  'what is taken away': [
    {
      ...answer,
      response: {
        $case: 'requestHeaders',
        value: {
          response: {
            ...common,
            status: 1,
            headerMutation: { setHeaders: [], removeHeaders: ['z'] },
            bodyMutation: { mutation: { $case: 'clearBody', value: true } },
          },
        },
      },
    },
    '0a0d0a0b0801120312017a1a021001',
  ],
  'a piece of a body in full duplex': [
    {
      ...answer,
      response: {
        $case: 'requestBody',
        value: {
          response: {
            ...common,
            bodyMutation: {
              mutation: { $case: 'streamedResponse', value: { body: Buffer.from('{}'), endOfStream: true } },
            },
          },
        },
      },
    },
    '1a0c0a0a1a081a060a027b7d1001',
  ],
};

describe('what a gateway sends', () => {
  it.each(Object.entries(requests))('%s', (_, [message, hex]) => {
    expect(Buffer.from(ProcessingRequest.encode(message).finish()).toString('hex')).toBe(hex);
    expect(decodeProcessingRequest(Buffer.from(hex, 'hex'))).toEqual(message);
  });

  it('fields that we do not use are skipped', () => {
    const withAttributes = Buffer.from('22030a01784a0f0a016e120a0a080a016b12031a0176', 'hex');
    expect(decodeProcessingRequest(withAttributes)).toEqual({
      ...none,
      request: { $case: 'requestBody', value: { body: Buffer.from('x'), endOfStream: false } },
    });
  });
});

describe('what we answer', () => {
  it.each(Object.entries(responses))('%s', (_, [message, hex]) => {
    expect(Buffer.from(ProcessingResponse.encode(message).finish()).toString('hex')).toBe(hex);
    expect(ProcessingResponse.decode(Buffer.from(hex, 'hex'))).toEqual(message);
  });
});

it('health as gRPC has it', () => {
  expect(Buffer.from(HealthCheckRequest.encode({ service: 'liveness' }).finish()).toString('hex')).toBe(
    '0a086c6976656e657373',
  );
  expect(HealthCheckResponse.decode(Buffer.from('0801', 'hex'))).toEqual({ status: ServingStatus.SERVING });
  expect([ServingStatus.UNKNOWN, ServingStatus.NOT_SERVING, ServingStatus.SERVICE_UNKNOWN]).toEqual([0, 2, 3]);
});

describe('a message is looked over before it is decoded', () => {
  const encode = (message: ProcessingRequest): Buffer => Buffer.from(ProcessingRequest.encode(message).finish());
  const large = Buffer.alloc(8 << 20, 1);

  it('a large body is no harm', () => {
    const bytes = encode({ ...none, request: { $case: 'responseBody', value: { body: large, endOfStream: true } } });
    const { request } = decodeProcessingRequest(bytes);
    expect(request?.$case === 'responseBody' && request.value.body.equals(large)).toBe(true);
  });

  it.each([
    ['headers', () => encode({ ...requests['a request body']![0], ...tooManyHeaders() })],
    [
      'a body of many fields',
      () => Buffer.concat([Buffer.from([0x22, 0xc0, 0x9a, 0x0c]), Buffer.alloc(200_000, 0x10)]),
    ],
    ['several bodies', () => Buffer.concat([largeBody(), largeBody()])],
    ['a body longer than itself', () => largeBody().subarray(0, -1)],
    ['a group', () => Buffer.concat([Buffer.from([0x0b]), largeBody()])],
    ['a number without an end', () => Buffer.alloc(200_000, 0xff)],
  ])('%s: refused', (_, bytes) => {
    expect(() => decodeProcessingRequest(bytes())).toThrow(/^ext_proc: /);
  });

  function largeBody(): Buffer {
    const body = Buffer.alloc(100_000);
    return encode({ ...none, request: { $case: 'requestBody', value: { body, endOfStream: false } } });
  }
  function tooManyHeaders(): Pick<ProcessingRequest, 'request'> {
    const headers = Array.from({ length: maxBesideBodyBytes / 8 }, (_, at) => raw(`h${at}`, 'value'));
    return { request: { $case: 'requestHeaders', value: { headers: { headers }, endOfStream: false } } };
  }

  it('never throws anything else, and refuses nothing that is small and well formed', () => {
    fc.assert(
      fc.property(fc.uint8Array({ maxLength: 400 }), fc.constantFrom(0, 200_000), (noise, more) => {
        const bytes = Buffer.concat([noise, Buffer.alloc(more)]);
        try {
          decodeProcessingRequest(bytes);
        } catch (error) {
          expect(error).toMatchObject({ name: 'KvError', code: 'PROTOCOL' });
        }
      }),
    );
    expect(boundedExternalProcessorService.process.requestDeserialize).toBe(decodeProcessingRequest);
  });
});
