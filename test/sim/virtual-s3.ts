/**
 * An S3 server in memory, behind `HttpPool.send` (bodies) and `S3Client.send` (LIST, DELETE): signing, retries, time limits and all
 * above are the real code. It answers late, with 500, 503 and 409, loses answers of what it has done, and hangs.
 *
 * Invariant: a caller's buffers are touched only in the event that ends its exchange.
 */

import { KvError } from '../../packages/errors/src/index.ts';
import type { HttpReply, HttpRequest, TryLimits } from '../../packages/tiers/src/s3/http-connection.ts';
import type { Entry, World } from './world.ts';

interface S3Object {
  readonly bytes: Buffer;
  readonly etag: string;
  readonly modifiedMs: number;
}

interface Command {
  readonly constructor: { readonly name: string };
  readonly input: { readonly Prefix?: string; readonly Key?: string };
}

export class VirtualS3 {
  readonly objects = new Map<string, S3Object>();
  /** Probabilities. */
  errors = 0;
  lostAnswers = 0;
  flips = 0;
  hangsUntilUs = 0;
  readonly counts = { puts: 0, gets: 0, lists: 0, deletes: 0, errors: 0, lost: 0, conflicts: 0 };
  readonly #world: World;
  #etag = 0;

  constructor(world: World) {
    this.#world = world;
  }

  get bytes(): number {
    let bytes = 0;
    for (const object of this.objects.values()) bytes += object.bytes.length;
    return bytes;
  }

  readonly http = {
    send: (request: HttpRequest, limits: TryLimits): Promise<HttpReply> => this.#send(request, limits),
    close: (): void => {},
  };

  readonly sdk = {
    send: (command: Command, options: { abortSignal?: AbortSignal } = {}): Promise<unknown> =>
      this.#command(command, options.abortSignal),
    destroy: (): void => {},
  };

  #send(request: HttpRequest, limits: TryLimits): Promise<HttpReply> {
    const world = this.#world;
    const key = decodeURIComponent(request.path).replace(/^\/bucket\//, '');
    return new Promise((resolve, reject) => {
      let answered: Entry | undefined;
      let ended = false;
      const limitMs = Math.max(1, Math.min(limits.deadlineMs - world.nowMs, limits.idleMs));
      const limit = world.schedule(limitMs * 1000, 's3 time limit', () => {
        if (answered !== undefined) world.cancel(answered);
        ended = true;
        reject(new KvError('DEADLINE', 'no answer from the server in time'));
      });
      const { life } = world;
      const bodyNow = (): Buffer => Buffer.concat(request.body.map((part) => Buffer.from(part)));
      const early = bodyNow();
      world.schedule(
        this.#delayUs(),
        `s3 ${request.method} ${key}`,
        () => {
          // It is sent out of the slots until the exchange ends; what had left by then may still arrive.
          const reply = this.#answer(request.method, key, request.headers, ended || !life.alive ? early : bodyNow());
          if (reply === undefined || ended) return; // the answer is lost
          answered = world.schedule(
            this.#delayUs(),
            `s3 answers ${reply.status}`,
            () => {
              world.cancel(limit);
              ended = true;
              resolve(this.#received(reply, request.targets));
            },
            life,
          );
        },
        world.servers,
      );
    });
  }

  #received({ status, etag, body }: Answer, targets: readonly Buffer[]): HttpReply {
    const headers = new Map([
      ['etag', `"${etag}"`],
      ['date', new Date(Date.now()).toUTCString()],
    ]);
    if (status !== 200 && status !== 206) return { status, headers, body: Buffer.from(`<Code>Sim${status}</Code>`) };
    if (targets.length === 0) return { status, headers, body };
    let at = 0;
    for (const target of targets) at += body.copy(target, 0, at);
    return { status, headers, body: Buffer.alloc(0) };
  }

  #answer(method: string, key: string, headers: HttpRequest['headers'], body: Buffer): Answer | undefined {
    const world = this.#world;
    const none = { etag: '', body: Buffer.alloc(0) };
    const isLost = world.chance(this.lostAnswers);
    if (isLost) this.counts.lost++;
    if (world.chance(this.errors)) {
      this.counts.errors++;
      return isLost ? undefined : { status: world.pick([500, 503]), ...none };
    }
    const held = this.objects.get(key);
    let answer: Answer;
    if (method === 'PUT') {
      this.counts.puts++;
      if (headers['if-none-match'] === '*' && held !== undefined) {
        this.counts.conflicts++;
        answer = { status: 412, ...none };
      } else {
        const etag = `e${this.#etag++}`;
        this.objects.set(key, { bytes: body, etag, modifiedMs: Date.now() });
        answer = { status: 200, ...none, etag };
      }
    } else {
      this.counts.gets++;
      const wanted = headers['if-match'];
      if (held === undefined) answer = { status: 404, ...none };
      else if (wanted !== undefined && wanted.replaceAll('"', '') !== held.etag) answer = { status: 412, ...none };
      else {
        const range = /^bytes=(\d+)-(\d+)$/.exec(headers.range ?? '');
        const part = range === null ? held.bytes : held.bytes.subarray(Number(range[1]), Number(range[2]) + 1);
        const content = Buffer.from(part);
        if (this.flips > 0 && world.chance(this.flips)) content[world.between(0, content.length - 1)]! ^= 4;
        answer = { status: range === null ? 200 : 206, etag: held.etag, body: content };
      }
    }
    return isLost ? undefined : answer;
  }

  #command(command: Command, signal: AbortSignal | undefined): Promise<unknown> {
    const world = this.#world;
    const { life } = world;
    return new Promise((resolve, reject) => {
      const abort = (): void => reject(Object.assign(new Error('aborted'), { name: 'AbortError' }));
      signal?.addEventListener('abort', abort);
      world.schedule(
        this.#delayUs(),
        `s3 ${command.constructor.name} ${command.input.Prefix ?? command.input.Key ?? ''}`,
        () => {
          const fails = world.chance(this.errors);
          if (fails) this.counts.errors++;
          const answer = fails ? undefined : this.#run(command);
          if (world.chance(this.lostAnswers)) return;
          world.schedule(
            this.#delayUs(),
            's3 answers',
            () => {
              if (!fails) resolve(answer);
              else
                reject(
                  Object.assign(new Error('we are sorry'), { name: 'SlowDown', $metadata: { httpStatusCode: 503 } }),
                );
            },
            life,
          );
        },
        world.servers,
      );
    });
  }

  #run(command: Command): unknown {
    const { input } = command;
    if (command.constructor.name === 'DeleteObjectCommand') {
      this.counts.deletes++;
      this.objects.delete(input.Key!);
      return {};
    }
    this.counts.lists++;
    const Contents = [...this.objects]
      .filter(([key]) => key.startsWith(input.Prefix ?? ''))
      .map(([Key, { etag, bytes, modifiedMs }]) => ({
        ...{ Key, ETag: `"${etag}"`, Size: bytes.length, LastModified: new Date(modifiedMs) },
      }));
    return { Contents, IsTruncated: false };
  }

  #delayUs(): number {
    const world = this.#world;
    const slow = world.chance(0.05) ? world.between(20_000, 400_000) : 0;
    return Math.max(0, this.hangsUntilUs - world.nowUs) + world.between(500, 8_000) + slow;
  }
}

interface Answer {
  readonly status: number;
  readonly etag: string;
  readonly body: Buffer;
}
