/**
 * A cache node for tests: the real protocol over a real Unix socket, contents in memory, and a script of faults. It
 * keeps the books of its client: slots that were reserved or leased and never given back, blocks committed wrongly.
 */
import { randomBytes } from 'node:crypto';
import { createServer, type Server, type Socket } from 'node:net';
import { type Attach, ClientFrame, FrameReader, ReserveStatus, ServerFrame, writeFrame } from '@kvtier/wire';
import type { ClientBody, ServerBody } from '../session-link.ts';
import { arenas, blockBytes, checksumOf, contentOf, hashBytes } from './memory.ts';

/** What happens to one request instead of, or with, the right answer. */
export type Fault =
  | 'none'
  | 'silent'
  | 'failure'
  | 'garbage'
  | 'foreign'
  | 'hang up'
  | 'restart'
  | 'wrong bytes'
  | 'wrong order'
  | 'wrong offset'
  | 'other epoch';

const slots = 512;
const arenaBytes = 4096 + slots * blockBytes;
const key = (hash: Uint8Array): string => Buffer.from(hash).toString('hex');

export class FakeNode {
  readonly #path: string;
  readonly attaches: Attach[] = [];
  readonly sessions: Buffer[] = [];
  attachFault: () => Fault = () => 'none';
  /** Asked for each request but Attach, in order of arrival. */
  fault: (body: ClientBody) => Fault = () => 'none';
  /** Keep requests unread, as a stopped process does. */
  stopped = false;
  /** Blocks per Ready frame. */
  readyBlocks = 3;
  /** So many blocks of a load are announced, and then nothing more, not even its end. */
  comes = Number.POSITIVE_INFINITY;
  /** Of each of these loads: says its end, if all of it was announced. */
  readonly lateEnds: (() => void)[] = [];
  /** What an estimate says, per block that is not in the arena. */
  spans: (held: number) => { tier: string; count: number }[] = (held) => [{ tier: 'arena', count: held }];
  estimatedUs = 0;
  held = new Map<string, { offset: number; checksum: bigint }>();
  /** Names of blocks that somebody else is writing. */
  readonly writing = new Set<string>();
  /** Slots given out for writing and not given back. */
  readonly reserved = new Map<bigint, string>();
  wantsTokenIds = false;
  /** Of each Reserve. */
  readonly saidTokens: (Buffer | undefined)[] = [];
  /** Loads not yet released. */
  readonly leases = new Set<bigint>();
  /** Loads that wait for blocks, by id: what their client asked for. */
  readonly awaiting = new Map<bigint, { readonly awaitMs: number; readonly check: () => void }>();
  readonly endedLoads: bigint[] = [];
  /** Hashes of each; the third is refused. */
  readonly prefetches: Buffer[] = [];
  readonly cancelledPrefetches: Buffer[] = [];
  readonly #prefetchIds = new Map<bigint, Buffer>();
  readonly corruptReports: { loadId: bigint; corrupt: number[] }[] = [];
  /** Broken promises of the client. */
  readonly wrongs: string[] = [];
  readonly log: string[] = [];
  #server: Server | undefined;
  readonly #sockets = new Set<Socket>();
  #memory = new Uint8Array(0);
  #arenaPath = '';
  #arenaId = 0n;
  #epoch = 0n;
  #nextSlot = 0;
  readonly #unread: (() => void)[] = [];

  constructor(path: string) {
    this.#path = path;
  }

  /** Listen, with an empty arena and a new boot epoch. */
  start(): Promise<void> {
    this.#epoch = randomBytes(8).readBigUInt64LE();
    this.#arenaId = randomBytes(8).readBigUInt64LE();
    this.#arenaPath = `/fake/${this.#arenaId}`;
    this.#memory = new Uint8Array(arenaBytes);
    arenas.set(this.#arenaPath, { id: this.#arenaId, bytes: this.#memory });
    this.held.clear();
    this.#nextSlot = 0;
    const server = createServer((socket) => this.#serve(socket));
    this.#server = server;
    return new Promise((resolve) => server.listen(this.#path, resolve));
  }

  /** As SIGKILL does: connections end, nothing is said. */
  kill(): Promise<void> {
    this.hangUp();
    this.#unread.length = 0;
    const server = this.#server;
    this.#server = undefined;
    return new Promise((resolve) => (server ? server.close(() => resolve()) : resolve()));
  }

  hangUp(): void {
    for (const socket of this.#sockets) socket.destroy();
  }

  /** SIGCONT. */
  go(): void {
    this.stopped = false;
    for (const read of this.#unread.splice(0)) read();
  }

  /** Hold a block without anybody having stored it. */
  seed(hash: Uint8Array, content = contentOf(hash)): void {
    const offset = this.#slot();
    this.#memory.set(content, offset);
    this.held.set(key(hash), { offset, checksum: checksumOf(contentOf(hash)) });
    this.#tellAwaiting();
  }

  #tellAwaiting(): void {
    for (const { check } of [...this.awaiting.values()]) check();
  }

  #slot(): number {
    return 4096 + (this.#nextSlot++ % slots) * blockBytes;
  }

  #serve(socket: Socket): void {
    this.#sockets.add(socket);
    socket.on('error', () => {});
    socket.on('close', () => {
      this.#sockets.delete(socket);
      this.reserved.clear();
      this.leases.clear();
      this.awaiting.clear();
    });
    const reader = new FrameReader((message) => {
      const frame = ClientFrame.decode(message);
      const handle = (): void => this.#handle(socket, frame);
      if (this.stopped) this.#unread.push(handle);
      else handle();
    });
    socket.on('data', (chunk: Buffer) => reader.push(chunk));
  }

  #handle(socket: Socket, { id, body }: ClientFrame): void {
    if (socket.destroyed || body === undefined) return;
    this.log.push(body.$case);
    const fault = body.$case === 'attach' ? this.attachFault() : this.fault(body);
    // As one does that was exchanged behind the connection: what it says is of another arena.
    const bootEpoch = fault === 'other epoch' ? this.#epoch ^ 1n : this.#epoch;
    const send = (answer: ServerBody): void => {
      writeFrame(socket, ServerFrame.encode({ id, bootEpoch, body: answer }).finish());
    };
    switch (fault) {
      case 'silent':
        if (body.$case === 'release') this.leases.delete(body.value.loadId);
        return;
      case 'failure':
        send({ $case: 'failure', value: { code: 'CAPACITY', message: 'scripted', retry: true, tier: '' } });
        return;
      case 'garbage':
        socket.write(randomBytes(64));
        return;
      case 'foreign':
        send({
          $case: 'attached',
          value: { session: Buffer.alloc(16), arenaPath: '', arenaBytes: 0n, headerBytes: 0, arenaId: 0n },
        });
        return;
      case 'hang up':
        socket.destroy();
        return;
      case 'restart':
        void this.kill().then(() => this.start());
        return;
      default:
        if (body.$case === 'load' && body.value.awaitMs) {
          this.#await(id, body.value.hashes, body.value.awaitMs, fault, send);
          return;
        }
        if (body.$case === 'load' && this.comes < Number.POSITIVE_INFINITY) {
          const loaded = split(body.value.hashes).length;
          this.lateEnds.push(() => send({ $case: 'loadDone', value: { loaded, reason: '' } }));
        }
        if (body.$case === 'endLoad') this.#endLoad(body.value.loadId, socket);
        for (const answer of this.#answer(id, body, fault)) send(answer);
    }
  }

  /** Blocks are told as they come, until all are there or the client ends it. */
  #await(id: bigint, packed: Buffer, awaitMs: number, fault: Fault, send: (answer: ServerBody) => void): void {
    this.leases.add(id);
    const count = split(packed).length;
    let told = 0;
    const check = (): void => {
      const ready = this.#prefix(packed).slice(told);
      if (fault === 'wrong bytes' && ready.length > 0) this.#memory[ready[0]!.offset]! ^= 1;
      if (ready.length > 0) send(readyOf(told, ready));
      told += ready.length;
      if (told < count) return;
      this.awaiting.delete(id);
      send({ $case: 'loadDone', value: { loaded: told, reason: '' } });
    };
    this.awaiting.set(id, { awaitMs, check });
    check();
  }

  #endLoad(loadId: bigint, socket: Socket): void {
    this.endedLoads.push(loadId);
    if (!this.awaiting.delete(loadId)) return;
    const body = { $case: 'loadDone', value: { loaded: 0, reason: 'cancelled' } } as const;
    writeFrame(socket, ServerFrame.encode({ id: loadId, bootEpoch: this.#epoch, body }).finish());
  }

  #answer(id: bigint, body: ClientBody, fault: Fault): ServerBody[] {
    switch (body.$case) {
      case 'attach': {
        const session = randomBytes(16);
        this.attaches.push(body.value);
        this.sessions.push(session);
        const arena = { arenaPath: this.#arenaPath, arenaBytes: BigInt(arenaBytes), arenaId: this.#arenaId };
        const wants = this.wantsTokenIds ? { wantsTokenIds: true } : {};
        return [{ $case: 'attached', value: { session, headerBytes: 0, ...arena, ...wants } }];
      }
      case 'lookup': {
        const held = this.#prefix(body.value.hashes).length;
        return [{ $case: 'lookup', value: { held, spans: this.spans(held), estimatedUs: this.estimatedUs } }];
      }
      case 'load':
        return this.#load(id, body.value.hashes, fault);
      case 'reserve': {
        const hashes = split(body.value.hashes);
        this.saidTokens.push(body.value.tokenIds);
        const status = hashes.map((hash) => {
          if (this.writing.has(key(hash))) return ReserveStatus.RESERVE_STATUS_BUSY;
          return this.held.has(key(hash)) ? ReserveStatus.RESERVE_STATUS_HELD : ReserveStatus.RESERVE_STATUS_RESERVED;
        });
        const offsets = hashes.map((hash, i) => {
          if (status[i] !== ReserveStatus.RESERVE_STATUS_RESERVED) return 0n;
          const offset = BigInt((fault === 'wrong offset' ? 1e9 : 0) + this.#slot());
          this.reserved.set(offset, key(hash));
          return offset;
        });
        return [{ $case: 'reserved', value: { status: fault === 'wrong order' ? [] : status, offsets, reason: '' } }];
      }
      case 'commit': {
        for (const [i, wire] of body.value.offsets.entries()) this.#commit(wire, body.value.checksums[i]!);
        return [{ $case: 'done', value: { count: body.value.offsets.length } }];
      }
      case 'abort':
        for (const offset of body.value.offsets) {
          if (!this.reserved.delete(offset)) this.wrongs.push(`abort of a slot that was not reserved: ${offset}`);
        }
        return [{ $case: 'done', value: { count: body.value.offsets.length } }];
      case 'release':
        this.leases.delete(body.value.loadId);
        this.awaiting.delete(body.value.loadId);
        if (body.value.corrupt.length > 0) this.corruptReports.push(body.value);
        return [{ $case: 'done', value: { count: 0 } }];
      case 'prefetch':
        this.prefetches.push(body.value.hashes);
        this.#prefetchIds.set(id, body.value.hashes);
        return [{ $case: 'prefetching', value: { accepted: this.prefetches.length < 3, reason: 'session_limit' } }];
      case 'cancelPrefetch': {
        const hashes = this.#prefetchIds.get(body.value.prefetchId);
        if (hashes === undefined) this.wrongs.push(`no prefetch ${body.value.prefetchId} to cancel`);
        else this.cancelledPrefetches.push(hashes);
        return [{ $case: 'done', value: { count: (hashes?.length ?? 0) / 8 } }];
      }
      case 'stats':
        return [{ $case: 'stats', value: { tiers: [], counters: {} } }];
      default:
        return [{ $case: 'done', value: { count: 0 } }];
    }
  }

  #load(id: bigint, packed: Buffer, fault: Fault): ServerBody[] {
    this.leases.add(id);
    const hashes = split(packed);
    const ready = this.#prefix(packed);
    if (fault === 'wrong bytes' && ready.length > 0) this.#memory[ready[ready.length >> 1]!.offset]! ^= 1;
    const answers: ServerBody[] = [];
    for (let first = 0; first < Math.min(ready.length, this.comes); first += this.readyBlocks) {
      const part = ready.slice(first, first + this.readyBlocks);
      answers.push({
        $case: 'ready',
        value: {
          first: fault === 'wrong order' ? first + 1 : first,
          offsets: part.map(({ offset }) => BigInt(fault === 'wrong offset' ? -offset >>> 0 : offset)),
          checksums: part.map(({ checksum }) => checksum),
          tier: 'arena',
        },
      });
    }
    if (this.comes < Number.POSITIVE_INFINITY) return answers;
    const reason = ready.length < hashes.length ? 'missing' : '';
    answers.push({ $case: 'loadDone', value: { loaded: ready.length, reason } });
    return answers;
  }

  #commit(wire: bigint, checksum: bigint): void {
    const name = this.reserved.get(wire);
    if (name === undefined) {
      this.wrongs.push(`commit of a slot that was not reserved: ${wire}`);
      return;
    }
    this.reserved.delete(wire);
    const offset = Number(wire);
    const bytes = this.#memory.slice(offset, offset + blockBytes);
    if (checksumOf(bytes) !== checksum) this.wrongs.push(`commit of ${name} with a checksum of other bytes`);
    if (checksumOf(contentOf(Buffer.from(name, 'hex'))) !== checksum) this.wrongs.push(`other bytes under ${name}`);
    this.held.set(name, { offset, checksum });
    this.#tellAwaiting();
  }

  #prefix(packed: Buffer): { offset: number; checksum: bigint }[] {
    const found = [];
    for (const hash of split(packed)) {
      const entry = this.held.get(key(hash));
      if (entry === undefined) break;
      found.push(entry);
    }
    return found;
  }
}

const readyOf = (first: number, blocks: readonly { offset: number; checksum: bigint }[]): ServerBody => ({
  $case: 'ready',
  value: {
    first,
    offsets: blocks.map(({ offset }) => BigInt(offset)),
    checksums: blocks.map(({ checksum }) => checksum),
    tier: 'arena',
  },
});

const split = (packed: Buffer): Buffer[] =>
  Array.from({ length: packed.length / hashBytes }, (_, i) => packed.subarray(i * hashBytes, (i + 1) * hashBytes));
