/**
 * The S3 API as the tier needs it. Listings, credentials and signatures by the SDK; the rest by our own connections, straight between socket and
 * arena, with an unsigned payload (the objects carry their own checksums).
 *
 * Invariants: every call ends by its deadline; what can pass by itself (5xx, 429, a connection that ended) is tried again after a
 * random wait below a growing bound ("full jitter"); `onTry` hears of every try, for the breaker.
 */
import { Agent } from 'node:https';
import type { S3Client, S3ClientConfig } from '@aws-sdk/client-s3';
import { KvError, Outside } from '@kvtier/errors';
import { bareEtag, dateIn, type ListedObject, listedIn } from './answers.ts';
import type { S3Credentials } from './credentials.ts';
import type { HttpReply, HttpRequest } from './http-connection.ts';
import { HttpPool } from './http-pool.ts';
import type { S3Plan } from './options.ts';

const firstBackoffMs = 50;
const maxBackoffMs = 2_000;
const busyBackoffMs = 500;
const maxTries = 6;
/** Insufficient Storage: not within the seconds of a request. */
const noRoom = 507;
/** A bucket lists 1000 keys at a time, and there are at most a million packs; beyond this something else lives under our prefix. */
const maxPages = 2_000;
/** Where the SDK has found no credentials at all, be it that there are none or that the machine's service does not answer now. */
const keysRemedy = '; give a credentialsFile, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or a role of the machine';

export interface ListedPage {
  readonly objects: readonly ListedObject[];
  /** When it was made, on the server's clock; undefined: it does not say. */
  readonly serverMs: number | undefined;
}

export interface S3ApiOptions {
  readonly plan: S3Plan;
  /**
   * `object`: what it says something of, of one object only; undefined: of the bucket. `isWrite`: of writes, and of nothing else
   * where it `isAnswered`, which means that the server has said what came of it.
   */
  readonly onTry: (
    failure: KvError | undefined,
    object: string | undefined,
    isWrite: boolean,
    isAnswered: boolean,
  ) => unknown;
  /** Why nothing is to be tried now; undefined: go on. */
  readonly suspended: () => string | undefined;
}

/** A write failed, and the server has said at each try that it stored nothing. */
export class NotStored extends KvError {}

type SdkError = Error & { Code?: string; $metadata?: { httpStatusCode?: number } };

let sdkLoading: Promise<typeof import('@aws-sdk/client-s3')> | undefined;

/** Loaded only where the tier is used, and once: it is a large tree. */
export function loadSdk(): Promise<typeof import('@aws-sdk/client-s3')> {
  // The version is pinned; that later ones want a newer Node is no news to who runs this.
  process.env.AWS_SDK_JS_NODE_VERSION_SUPPORT_WARNING_DISABLED ??= 'true';
  sdkLoading ??= import('@aws-sdk/client-s3');
  return sdkLoading;
}

export class S3Api {
  readonly #plan: S3Plan;
  readonly #options: S3ApiOptions;
  readonly #sdk: typeof import('@aws-sdk/client-s3');
  readonly #client: Outside<S3Client>;
  readonly #pool: HttpPool;
  readonly #host: string;
  readonly #basePath: string;
  /** RGW wants the ETag of If-Match without its quotes in some versions; others with them. Found out at start; undefined: not yet. */
  quotedEtags: boolean | undefined;
  /** The server writes in the place of a named ETag only (If-Match of PUT). Found out before the first pack is written. */
  canReplace = false;
  /** An answer named a version: what is deleted stays, so that no budget can be kept. */
  hasVersions = false;
  /** Server time minus ours, from the Date of its answers: for signatures. Our clock may be set at any time, so nothing is judged by it. */
  clockOffsetMs = 0;
  requestCount = 0;
  retryCount = 0;
  /** Ends of the waits for credentials, listings, and pauses. */
  readonly #waits = new Set<() => void>();
  #closed = false;

  static async open(options: S3ApiOptions): Promise<S3Api> {
    return new S3Api(options, await loadSdk());
  }

  private constructor(options: S3ApiOptions, sdk: typeof import('@aws-sdk/client-s3')) {
    const { plan } = options;
    this.#plan = plan;
    this.#options = options;
    this.#sdk = sdk;
    const { url, bucket, pathStyle, secrets } = plan;
    const agent = secrets.ca === undefined ? undefined : new Agent({ keepAlive: true, maxSockets: 50, ca: secrets.ca });
    secrets.onCa = (ca) => Object.assign(agent?.options ?? {}, { ca });
    const settings: S3ClientConfig = {
      endpoint: url.origin,
      region: plan.region,
      forcePathStyle: pathStyle,
      maxAttempts: 1,
      ...(secrets.credentials === undefined ? {} : { credentials: async () => asked(secrets.credentials!) }),
      requestHandler: {
        connectionTimeout: plan.idleLimitMs,
        requestTimeout: plan.idleLimitMs,
        throwOnRequestTimeout: true,
        ...(agent === undefined ? {} : { httpsAgent: agent }),
      },
    };
    this.#client = new Outside('credentials, or the server', new sdk.S3Client(settings));
    this.#client.now(({ middlewareStack }) => {
      // The SDK drops the head of an answer; the time in it says how old an object is.
      const keepsDate: Parameters<typeof middlewareStack.use>[0] = {
        applyToStack: (stack) =>
          stack.add(
            (next) => async (args) => {
              const result = await next(args);
              const { headers } = result.response as { headers?: Record<string, string> };
              Object.assign(result.output?.$metadata ?? {}, { date: headers?.date });
              return result;
            },
            { step: 'deserialize', priority: 'high' },
          ),
      };
      middlewareStack.use(keepsDate);
    });
    const host = pathStyle ? url.hostname : `${bucket}.${url.hostname}`;
    const tls = url.protocol === 'https:';
    const port = url.port === '' ? (tls ? 443 : 80) : Number(url.port);
    this.#host = url.port === '' ? host : `${host}:${url.port}`;
    this.#basePath = pathStyle ? `/${bucket}/` : '/';
    const origin = {
      ...{ tls, host: host.replaceAll(/[[\]]/g, ''), port },
      get ca() {
        return secrets.ca;
      },
    };
    this.#pool = new HttpPool(origin, plan.maxConnections);
  }

  /**
   * Bytes of an object from `first` on, into `targets` until they are full. false: it is not there, or (with `etag`) not that one
   * any more. `isNews`: a failure is told to `onTry`.
   */
  async get(
    key: string,
    etag: string | null,
    first: number,
    targets: readonly Buffer[],
    deadlineMs: number,
    isNews = true,
  ): Promise<boolean> {
    const bytes = targets.reduce((sum, target) => sum + target.length, 0);
    const headers: Record<string, string> = { range: `bytes=${first}-${first + bytes - 1}` };
    if (etag !== null) headers['if-match'] = this.#etagHeader(etag);
    const once = async (): Promise<HttpReply> => {
      const answer = await this.#send({ method: 'GET', key, headers, body: [], targets }, deadlineMs);
      if ([200, 206, 404, 412, 416].includes(answer.status)) return answer;
      throw failureOf(answer);
    };
    const reply = await this.#tried(`GET ${key}`, deadlineMs, once, isNews ? 'object' : 'nothing');
    return reply.status === 200 || reply.status === 206;
  }

  /** Length and content of a small object; undefined: not there. */
  async getSmall(key: string, etag: string | null, deadlineMs: number): Promise<Buffer | undefined> {
    const headers: Record<string, string> = etag === null ? {} : { 'if-match': this.#etagHeader(etag) };
    const reply = await this.#tried(`GET ${key}`, deadlineMs, async () => {
      const answer = await this.#send({ method: 'GET', key, headers, body: [], targets: [] }, deadlineMs);
      if ([200, 404, 412].includes(answer.status)) return answer;
      throw failureOf(answer);
    });
    return reply.status === 200 ? reply.body : undefined;
  }

  /**
   * Write an object only where none is (`replaced` null), or only in the place of the one with that ETag; 'other': something else is
   * there. `unsure`: a try had no answer, or none that says what was stored, so that it may be this very object. NotStored when none is.
   * `isPack`: that it went well says that others will.
   */
  async put(
    key: string,
    body: readonly Uint8Array[],
    replaced: string | null,
    deadlineMs: number,
    isPack = true,
  ): Promise<{ outcome: 'stored' | 'other'; etag: string; unsure: boolean }> {
    const condition = replaced === null ? { 'if-none-match': '*' } : { 'if-match': this.#etagHeader(replaced) };
    const headers = { 'content-type': 'application/octet-stream', ...condition };
    let tries = 0;
    let refusals = 0;
    const once = async (): Promise<HttpReply> => {
      tries++;
      const answer = await this.#send({ method: 'PUT', key, headers, body, targets: [] }, deadlineMs);
      // 409: another conditional write of this key is in progress; it wins or it does not, the next try will see.
      if ([200, 412].includes(answer.status) || (replaced !== null && answer.status === 404)) return answer;
      if ((answer.status >= 400 && answer.status < 500) || answer.status === noRoom) refusals++;
      throw failureOf(answer);
    };
    const reply = await this.#tried(`PUT ${key}`, deadlineMs, once, isPack ? 'write' : 'room').catch(
      (error: unknown) => {
        if (!(error instanceof KvError) || tries > refusals) throw error;
        throw new NotStored(error.code, error.message, { retry: error.retry });
      },
    );
    const etag = bareEtag(reply.headers.get('etag') ?? '');
    // A 200 that does not name what it has stored may be an error's.
    const isNamed = reply.status !== 200 || etag !== '';
    return { outcome: reply.status === 200 && isNamed ? 'stored' : 'other', etag, unsure: tries > 1 || !isNamed };
  }

  /** `isForWrite`: to make room for one. A failure of any other one says nothing of what else the server does. */
  async delete(key: string, deadlineMs: number, isForWrite = false): Promise<void> {
    const once = async (): Promise<void> => {
      const answer = await this.#send({ method: 'DELETE', key, headers: {}, body: [], targets: [] }, deadlineMs);
      if (![200, 204, 404].includes(answer.status)) throw failureOf(answer);
    };
    await this.#tried(`DELETE ${key}`, deadlineMs, once, isForWrite ? 'room' : 'nothing');
  }

  /** All objects whose key begins with the tier's prefix and `below`: few. */
  async list(below: string, deadlineMs: number): Promise<ListedObject[]> {
    const objects: ListedObject[] = [];
    for await (const page of this.pages(below, () => deadlineMs)) objects.push(...page.objects);
    return objects;
  }

  /** The same, in the order of their keys, with the server's own time when it said so. `deadlineOf`: of the page that is asked for next. */
  async *pages(below: string, deadlineOf: () => number): AsyncGenerator<ListedPage> {
    const { bucket, prefix } = this.#plan;
    let token: string | undefined;
    for (let page = 0; page < maxPages; page++) {
      const request = { Bucket: bucket, Prefix: prefix + below, ContinuationToken: token };
      const once = (limitMs: number) =>
        this.#untilClosed(
          this.#client.ask(limitMs, (client, abortSignal) =>
            client.send(new this.#sdk.ListObjectsV2Command(request), { abortSignal }),
          ),
        );
      const answer = await this.#tried(`LIST ${prefix}${below}`, deadlineOf(), once, 'bucket');
      // Whatever else comes with a 200 (an error, a page of a proxy) has nothing in it, and an empty bucket is something else.
      if (typeof answer.IsTruncated !== 'boolean')
        throw new KvError('PROTOCOL', `s3: LIST ${prefix}${below}: no listing`);
      const { date } = answer.$metadata as { date?: string };
      const serverMs = dateIn(date);
      if (serverMs !== undefined) this.#heardTime(serverMs);
      const objects = (answer.Contents ?? []).flatMap((each) => listedIn(each, prefix) ?? []);
      yield { objects, serverMs };
      if (!answer.IsTruncated) return;
      token = answer.NextContinuationToken;
      if (!token) break;
    }
    // What was not named is not gone.
    throw new KvError('PROTOCOL', `s3: LIST ${prefix}${below}: the listing does not come to its end`);
  }

  /** Why nothing is tried now; undefined: it is. */
  get suspended(): string | undefined {
    return this.#closed ? 'the client was closed' : this.#options.suspended();
  }

  /** What is asked for now fails, and no byte of it arrives any more. */
  close(): void {
    this.#closed = true;
    this.#plan.secrets.close();
    this.#pool.close();
    this.#client.now((client) => client.destroy());
    for (const end of this.#waits) end();
  }

  #etagHeader(etag: string): string {
    return this.quotedEtags ? `"${etag}"` : etag;
  }

  async #send(
    request: { method: HttpRequest['method']; key: string; headers: Record<string, string> } & Pick<
      HttpRequest,
      'body' | 'targets'
    >,
    deadlineMs: number,
  ): Promise<HttpReply> {
    const { method, key, body, targets } = request;
    const path = this.#basePath + (this.#plan.prefix + key).split('/').map(encodeURIComponent).join('/');
    const bodyBytes = body.reduce((sum, part) => sum + part.length, 0);
    const { protocol, hostname } = this.#plan.url;
    // Credentials may come from a process or another server, which may hang.
    const limitMs = Math.min(deadlineMs - performance.now(), this.#plan.idleLimitMs);
    const sign = async (client: S3Client): Promise<HttpRequest['headers']> => {
      const scheme = { name: 'sigv4', signingName: 's3', signingRegion: this.#plan.region, properties: {} };
      const signer = await client.config.signer(scheme);
      const signed = await signer.sign(
        // The class of this literal is the SDK's own; only these fields are read.
        {
          ...{ method, protocol, hostname, path, query: {} },
          headers: { host: this.#host, 'x-amz-content-sha256': 'UNSIGNED-PAYLOAD', ...request.headers },
        } as Parameters<typeof signer.sign>[0],
        { signingDate: new Date(Date.now() + this.clockOffsetMs) },
      );
      return signed.headers;
    };
    const signed = await this.#untilClosed(this.#client.ask(limitMs, sign, 'credentials'));
    const headers = { ...signed, ...(method === 'PUT' ? { 'content-length': String(bodyBytes) } : {}) };
    const limits = { deadlineMs, idleMs: this.#plan.idleLimitMs };
    const reply = await this.#pool.send({ method, path, headers, body, targets }, limits);
    const version = reply.headers.get('x-amz-version-id');
    if (version !== undefined && version !== 'null') this.hasVersions = true;
    const serverMs = dateIn(reply.headers.get('date'));
    if (serverMs !== undefined) this.#heardTime(serverMs);
    return reply;
  }

  #heardTime(serverMs: number): void {
    // Its header has whole seconds: a smaller difference is none.
    const differenceMs = serverMs - Date.now();
    this.clockOffsetMs = Math.abs(differenceMs) > 1500 ? differenceMs : 0;
  }

  /** What is not the pool's, which ends its own: no wait for it outlasts the client. */
  #untilClosed<T>(work: Promise<T>): Promise<T> {
    return new Promise((resolve, reject) => {
      const end = (): void => reject(new KvError('DISCONNECTED', 'the client was closed'));
      this.#waits.add(end);
      void work.then(resolve, reject).finally(() => this.#waits.delete(end));
    });
  }

  /** `about`: what a failure is told of; 'room': of writes, but that it went well (there was room) says nothing of them. */
  async #tried<T>(
    what: string,
    deadlineMs: number,
    once: (limitMs: number) => Promise<T>,
    about: 'bucket' | 'object' | 'write' | 'room' | 'nothing' = 'object',
  ): Promise<T> {
    const object = about === 'bucket' ? undefined : what;
    for (let tries = 1; ; tries++) {
      const reason = this.suspended;
      if (reason !== undefined) throw new KvError('IO', `s3: ${what}: not tried: ${reason}`, { retry: true });
      const leftMs = deadlineMs - performance.now();
      if (leftMs <= 0) throw new KvError('DEADLINE', `s3: ${what}: the time limit was reached`, { retry: true });
      try {
        this.requestCount++;
        const result = await once(Math.min(leftMs, this.#plan.idleLimitMs * 2));
        this.#options.onTry(undefined, object, about === 'write', true);
        return result;
      } catch (error) {
        const { failure, mayPass, isBusy } = judged(error, what);
        const isWrite = about === 'write' || about === 'room';
        if (about !== 'nothing') this.#options.onTry(failure, object, isWrite, error instanceof StatusError);
        // "Slow down" is meant: never less than half a second.
        const leastMs = isBusy ? busyBackoffMs : 0;
        const waitMs = leastMs + Math.random() * Math.min(maxBackoffMs, firstBackoffMs * 2 ** tries);
        if (!mayPass || this.#closed || tries >= maxTries || performance.now() + waitMs >= deadlineMs) throw failure;
        this.retryCount++;
        await this.#untilClosed(new Promise((resolve) => setTimeout(resolve, waitMs)));
      }
    }
  }
}

/** The SDK keeps what does not end, and asks again for what ends soon: so each request has the credentials of now. */
const asked = (credentials: S3Credentials) => ({ ...credentials, expiration: new Date() });

class StatusError extends Error {
  readonly status: number;
  readonly s3Code: string;
  constructor(status: number, s3Code: string) {
    super(`HTTP ${status} ${s3Code}`.trim());
    this.status = status;
    this.s3Code = s3Code;
  }
}

const failureOf = (reply: HttpReply): StatusError =>
  new StatusError(reply.status, /<Code>(\w+)<\/Code>/.exec(reply.body.toString('latin1'))?.[1] ?? '');

/** One line of what happened, and whether another try may help. */
function judged(error: unknown, what: string): { failure: KvError; mayPass: boolean; isBusy: boolean } {
  if (error instanceof KvError) {
    const mayPass = error.code !== 'PROTOCOL';
    return {
      failure: new KvError(error.code, `s3: ${what}: ${error.message}`, { retry: mayPass }),
      mayPass,
      isBusy: false,
    };
  }
  const sdkError = error as SdkError;
  const status = error instanceof StatusError ? error.status : sdkError.$metadata?.httpStatusCode;
  const s3Code = error instanceof StatusError ? error.s3Code : (sdkError.Code ?? sdkError.name);
  const message =
    status === undefined ? `${s3Code} ${sdkError.message}`.replaceAll(/\s+/g, ' ').trim() : `HTTP ${status} ${s3Code}`;
  const hasNoKeys = status === undefined && sdkError.name === 'CredentialsProviderError';
  const mayPass =
    status === undefined
      ? !hasNoKeys
      : (status >= 500 && status !== 501 && status !== noRoom) ||
        [408, 409, 429].includes(status) ||
        s3Code === 'RequestTimeTooSkewed'; // its answer has the time
  const line = `s3: ${what}: ${message}${hasNoKeys ? keysRemedy : ''}`;
  const failure = new KvError('IO', line, { retry: mayPass || hasNoKeys });
  return { failure, mayPass, isBusy: status === 503 || status === 429 };
}
