/**
 * An S3 server in memory, behind `HttpPool.send` (objects) and `S3Client.send` (listings): signing, retries, time limits and all
 * above are the real code. What servers differ in is drawn: how an ETag is quoted, whether a PUT may replace (If-Match), the pages
 * of a listing, the clock. It answers late, with 500, 503 and 409, loses answers to what it has done, cuts bodies off, and hangs.
 *
 * Invariants: a caller's buffers are touched only in the event that ends its exchange. Checked with every request: no PUT without
 * a condition, no pack but whole and right ones (law 1), what is not ours stays as it is.
 */
import { KvError, type Outside } from '@kvtier/errors';
import type { HttpReply, HttpRequest, TryLimits } from '@kvtier/tiers/s3/testing';
import { decodePackTable, packTableBytesOf } from '@kvtier/tiers/s3/testing';
import { mustBeStored } from './contents.ts';
import { type Entry, Violation, type World } from './world.ts';

interface S3Object {
  readonly bytes: Buffer;
  readonly etag: string;
  readonly modifiedMs: number;
  /** Where it was damaged at rest. */
  readonly rotten: Set<number>;
}

interface Command {
  readonly constructor: { readonly name: string };
  readonly input: { readonly Prefix?: string; readonly ContinuationToken?: string | undefined };
}

interface Answer {
  readonly status: number;
  readonly etag: string;
  readonly body: Buffer;
}

const bucket = '/bucket/';
const packs = 'kvtier/v1/packs/';
/** Of an If-Match that is understood. */
const quoting = { bare: /^[^"]+$/, quoted: /^".+"$/, both: /./ } as const;

export class VirtualS3 {
  readonly objects = new Map<string, S3Object>();
  /** Somebody else's, under our prefix, by key. */
  readonly foreign = new Map<string, Buffer>();
  /** Probabilities. */
  errors = 0;
  lostAnswers = 0;
  cuts = 0;
  flips = 0;
  hangsUntilUs = 0;
  /** Whoever has the credentials is silent until then. */
  credentialsHangUntilUs = 0;
  /** `flips`: damaged bytes that were delivered. */
  readonly counts = { puts: 0, gets: 0, lists: 0, deletes: 0, errors: 0, lost: 0, cuts: 0, conflicts: 0, flips: 0 };
  /** Hears of violations. */
  report: (error: unknown) => void = () => {};
  readonly #world: World;
  readonly #quoting: RegExp;
  readonly #replaces: 'yes' | 'ignores' | 'refuses';
  readonly #pageKeys: number;
  readonly #clockOffsetMs: number;
  /** PUTs on their way, by key. */
  readonly #putting = new Map<string, number>();
  #etag = 0;

  constructor(world: World) {
    this.#world = world;
    this.#quoting = quoting[world.pick(['bare', 'quoted', 'both'] as const)];
    this.#replaces = world.pick(['yes', 'yes', 'ignores', 'refuses']);
    this.#pageKeys = world.pick([1_000, 3]);
    this.#clockOffsetMs = world.pick([0, 0, -45_000, 90_000]);
    if (world.chance(0.5)) this.#putForeign(`${packs}${String(world.between(0, 9)).padStart(8, '0')}`);
    if (world.chance(0.5)) this.#putForeign('kvtier/v1/packs/README');
  }

  /** Of ours. */
  get bytes(): number {
    let bytes = 0;
    for (const [key, object] of this.objects) if (!this.foreign.has(key)) bytes += object.bytes.length;
    return bytes;
  }

  get packCount(): number {
    return this.#packKeys().length;
  }

  /** Objects under the names of the first so many packs, ours or not. */
  takenSlots(packCount: number): number {
    const slots = [...this.objects.keys()].flatMap((key) => /^kvtier\/v1\/packs\/(\d{8})$/.exec(key)?.[1] ?? []);
    return slots.filter((slot) => Number(slot) < packCount).length;
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

  /** What replaces a method of Outside: the wait for credentials and a signature. */
  outside(ask: typeof Outside.prototype.ask): typeof Outside.prototype.ask {
    const world = this.#world;
    const isHung = (): boolean => this.credentialsHangUntilUs > world.nowUs;
    return function (this: Outside<object>, limitMs, call, what) {
      const never = (): Promise<never> => new Promise(() => {});
      return ask.call(this, limitMs, what === 'credentials' && isHung() ? never : call, what) as never;
    };
  }

  /** Somebody deletes of ours what he likes. */
  forget(): void {
    for (const key of [...this.objects.keys()]) {
      if (!this.foreign.has(key) && this.#world.chance(0.5)) this.objects.delete(key);
    }
  }

  /** A byte of some pack turns over at rest. */
  rot(): void {
    const keys = this.#packKeys();
    if (keys.length === 0) return;
    const { bytes, rotten } = this.objects.get(this.#world.pick(keys))!;
    const at = this.#world.between(0, bytes.length - 1);
    bytes[at]! ^= 2;
    if (!rotten.delete(at)) rotten.add(at);
  }

  checkForeign(): void {
    for (const [key, content] of this.foreign) {
      if (!this.objects.get(key)?.bytes.equals(content))
        throw new Violation(`law 1: s3: ${key} is not ours, and is gone`);
    }
  }

  #packKeys(): string[] {
    return [...this.objects.keys()].filter((key) => key.startsWith(packs) && !this.foreign.has(key));
  }

  #putForeign(key: string): void {
    const content = Buffer.alloc(this.#world.pick([5, 3_000]), 'not ours');
    this.foreign.set(key, content);
    this.#store(key, Buffer.from(content));
  }

  #store(key: string, bytes: Buffer): string {
    const etag = `e${this.#etag++}`;
    this.objects.set(key, { bytes, etag, modifiedMs: this.#nowMs(), rotten: new Set() });
    return etag;
  }

  #nowMs(): number {
    return this.#world.startMs + this.#world.nowMs + this.#clockOffsetMs;
  }

  #send(request: HttpRequest, limits: TryLimits): Promise<HttpReply> {
    const world = this.#world;
    const { life } = world;
    const { method, headers, targets } = request;
    const key = decodeURIComponent(request.path).slice(bucket.length);
    return new Promise((resolve, reject) => {
      let answered: Entry | undefined;
      let ended = false;
      const end = (tell: () => void): void => {
        if (ended) return;
        ended = true;
        if (answered !== undefined) world.cancel(answered);
        world.cancel(limit);
        tell();
      };
      const limitMs = Math.max(1, Math.min(limits.deadlineMs - world.nowMs, limits.idleMs));
      const limit = world.schedule(limitMs * 1000, 's3 time limit', () =>
        end(() => reject(new KvError('DEADLINE', 'no answer from the server in time'))),
      );
      const bodyNow = (): Buffer => Buffer.concat(request.body.map((part) => Buffer.from(part)));
      const early = bodyNow();
      if (method === 'PUT') this.#putting.set(key, (this.#putting.get(key) ?? 0) + 1);
      world.schedule(
        this.#delayUs(),
        `s3 ${method} ${key}`,
        () => {
          const others = this.#putting.get(key)! - 1;
          if (method === 'PUT') this.#putting.set(key, others);
          // It leaves the slots until the exchange ends; after that, all of it may have left before, or not all.
          const isAway = ended || !life.alive;
          if (method === 'PUT' && isAway && world.chance(0.5)) return;
          const answer = this.#run(method, key, headers, isAway ? early : bodyNow(), others > 0);
          const isLost = world.chance(this.lostAnswers);
          if (isLost) this.counts.lost++;
          if (isAway || (isLost && world.chance(0.5))) return;
          answered = world.schedule(
            this.#delayUs(),
            `s3 answers ${isLost ? 'nothing' : answer.status}`,
            () =>
              end(() => {
                if (isLost) reject(new KvError('DISCONNECTED', 'the server closed the connection'));
                else this.#deliver(answer, targets, resolve, reject);
              }),
            life,
          );
        },
        world.servers,
      );
    });
  }

  /** What a connection would do with the answer. */
  #deliver(
    { status, etag, body }: Answer,
    targets: readonly Buffer[],
    resolve: (reply: HttpReply) => void,
    reject: (error: KvError) => void,
  ): void {
    const headers = new Map([
      ['etag', `"${etag}"`],
      ['date', new Date(this.#nowMs()).toUTCString()],
    ]);
    if (status !== 200 && status !== 206) {
      resolve({ status, headers, body: Buffer.from(`<Code>Sim${status}</Code>`) });
      return;
    }
    if (targets.length === 0) {
      resolve({ status, headers, body });
      return;
    }
    const wanted = targets.reduce((sum, target) => sum + target.length, 0);
    if (wanted !== body.length) {
      reject(new KvError('PROTOCOL', `a body of ${body.length} bytes where ${wanted} were asked`));
      return;
    }
    const isCut = this.#world.chance(this.cuts);
    const arrives = isCut ? body.subarray(0, this.#world.between(0, body.length - 1)) : body;
    let at = 0;
    for (const target of targets) at += arrives.copy(target, 0, at);
    if (isCut) this.counts.cuts++;
    if (isCut) reject(new KvError('DISCONNECTED', 'the server closed the connection'));
    else resolve({ status, headers, body: Buffer.alloc(0) });
  }

  #run(method: string, key: string, headers: HttpRequest['headers'], body: Buffer, isContended: boolean): Answer {
    const world = this.#world;
    if (world.chance(this.errors)) {
      this.counts.errors++;
      return answer(world.pick([500, 503]));
    }
    if (method === 'PUT') return this.#put(key, headers, body, isContended);
    if (method === 'GET') return this.#get(key, headers);
    this.counts.deletes++;
    this.#mustBeOurs('DELETE', key);
    this.objects.delete(key);
    return answer(204);
  }

  #put(key: string, headers: HttpRequest['headers'], body: Buffer, isContended: boolean): Answer {
    this.counts.puts++;
    this.#check(key, headers, body);
    if (isContended && this.#world.chance(0.5)) return this.#conflict(409);
    const held = this.objects.get(key);
    const replaced = headers['if-match'];
    if (headers['if-none-match'] === '*' && held !== undefined) return this.#conflict(412);
    if (replaced !== undefined && this.#replaces === 'refuses') return answer(400);
    if (replaced !== undefined && this.#replaces === 'yes') {
      if (held === undefined) return answer(404);
      if (!this.#isMatch(replaced, held.etag)) return this.#conflict(412);
    }
    this.#mustBeOurs('PUT', key);
    return answer(200, this.#store(key, body));
  }

  #get(key: string, headers: HttpRequest['headers']): Answer {
    this.counts.gets++;
    const held = this.objects.get(key);
    if (held === undefined) return answer(404);
    const wanted = headers['if-match'];
    if (wanted !== undefined && !this.#isMatch(wanted, held.etag)) return answer(412);
    const range = /^bytes=(\d+)-(\d+)$/.exec(headers.range ?? '');
    const first = Number(range?.[1] ?? 0);
    if (first >= held.bytes.length) return answer(416);
    const content = Buffer.from(held.bytes.subarray(first, range === null ? undefined : Number(range[2]) + 1));
    if (this.flips > 0 && this.#world.chance(this.flips)) {
      content[this.#world.between(0, content.length - 1)]! ^= 4;
      this.counts.flips++;
    }
    for (const at of held.rotten) if (at >= first && at < first + content.length) this.counts.flips++;
    return answer(range === null ? 200 : 206, held.etag, content);
  }

  #conflict(status: number): Answer {
    this.counts.conflicts++;
    return answer(status);
  }

  #isMatch(wanted: string, etag: string): boolean {
    return this.#quoting.test(wanted) && wanted.replaceAll('"', '') === etag;
  }

  #mustBeOurs(method: string, key: string): void {
    if (this.foreign.has(key)) this.report(new Violation(`law 1: s3: ${method} of ${key}, which is not ours`));
  }

  /** Law 1: what is stored are whole packs of right blocks; and none takes another's place unasked. */
  #check(key: string, headers: HttpRequest['headers'], body: Buffer): void {
    if (headers['if-none-match'] !== '*' && headers['if-match'] === undefined)
      this.report(new Violation(`law 1: s3: PUT of ${key} without a condition`));
    if (!key.startsWith(packs)) return;
    const tableBytes = packTableBytesOf(body);
    const table =
      typeof tableBytes === 'number' ? decodePackTable(body.subarray(0, tableBytes), body.length) : tableBytes;
    if (typeof table === 'string') {
      this.report(new Violation(`law 1: s3: PUT of ${key}: its table is ${table}`));
      return;
    }
    try {
      for (const { namespace, hash, offset } of table.records)
        mustBeStored(body, offset, namespace, hash, `s3: ${key}`);
    } catch (error) {
      this.report(error);
    }
  }

  #command(command: Command, signal: AbortSignal | undefined): Promise<unknown> {
    const world = this.#world;
    const { life } = world;
    const { Prefix = '', ContinuationToken: after = '' } = command.input;
    if (command.constructor.name !== 'ListObjectsV2Command')
      throw new Error(`simulation: s3 ${command.constructor.name} is not simulated`);
    return new Promise((resolve, reject) => {
      signal?.addEventListener('abort', () => reject(Object.assign(new Error('aborted'), { name: 'AbortError' })));
      world.schedule(
        this.#delayUs(),
        `s3 LIST ${Prefix} ${after}`,
        () => {
          const fails = world.chance(this.errors);
          if (fails) this.counts.errors++;
          const page = this.#list(Prefix, after);
          if (world.chance(this.lostAnswers)) {
            this.counts.lost++;
            return;
          }
          const failure = { name: 'SlowDown', $metadata: { httpStatusCode: world.pick([500, 503]) } };
          world.schedule(
            this.#delayUs(),
            's3 answers',
            () => (fails ? reject(Object.assign(new Error('we are sorry'), failure)) : resolve(page)),
            life,
          );
        },
        world.servers,
      );
    });
  }

  /** One page, in the order of the keys: what changes between two pages is seen in part. */
  #list(prefix: string, after: string): object {
    this.counts.lists++;
    const keys = [...this.objects.keys()].filter((key) => key.startsWith(prefix) && key > after).sort();
    const Contents = keys.slice(0, this.#pageKeys).map((Key) => {
      const { etag, bytes, modifiedMs } = this.objects.get(Key)!;
      // Listings have whole seconds.
      const LastModified = new Date(Math.floor(modifiedMs / 1000) * 1000);
      return { Key, ETag: `"${etag}"`, Size: bytes.length, LastModified };
    });
    const IsTruncated = keys.length > Contents.length;
    const $metadata = { date: new Date(this.#nowMs()).toUTCString() };
    return {
      $metadata,
      Contents,
      IsTruncated,
      ...(IsTruncated ? { NextContinuationToken: Contents.at(-1)!.Key } : {}),
    };
  }

  #delayUs(): number {
    const world = this.#world;
    const slow = world.chance(0.05) ? world.between(20_000, 400_000) : 0;
    return Math.max(0, this.hangsUntilUs - world.nowUs) + world.between(500, 8_000) + slow;
  }
}

function answer(status: number, etag = '', body: Buffer = Buffer.alloc(0)): Answer {
  return { status, etag, body };
}
