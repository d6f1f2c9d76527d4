/**
 * The one TypeScript mirror of the native data plane (`packages/base/data-plane/cc/`). Same names, same order as in the C++
 * `binding_*.cc` files. The boundary is thin: arguments are validated in TypeScript above it; `null` means absent;
 * errors are thrown as `Error("CODE: message")` and turned into KvError by the callers (KvError.from).
 *
 * Offsets and byte counts are JavaScript numbers (exact below 2^53). Checksums are XXH3-64 with seed 0, as bigint.
 */

/** A mapped arena. Opaque; closed by `arenaClose` or when collected. */
export type ArenaHandle = { readonly __arena: never };
/** An I/O queue with its ring or threads. Opaque. */
export type IoHandle = { readonly __io: never };
/** The first bytes of a file, as memory. Opaque. */
export type MappingHandle = { readonly __mapping: never };
export type PulseHandle = { readonly __pulse: never };
/** Which file it is, of all that are there. */
export interface FileIdentity {
  readonly device: bigint;
  readonly inode: bigint;
}
/** A thread for calls to one file system. Opaque. */
export type FilesHandle = { readonly __files: never };
/** Connections to Redis servers for values, and their thread. Opaque. */
export type ValuesHandle = { readonly __bulk: never };
/** A peer data plane with its threads and connections. Opaque. */
export type PeerHandle = { readonly __peer: never };

/** A subscription to KV events and its thread. Opaque; closed by `kvEventsClose` or when collected. */
export type KvEventsHandle = { readonly __kvEvents: never };

/** Messages of a publisher whose sequence numbers follow each other. */
export interface KvEventBurst {
  /**
   * Of each message: its sequence number (low word, high word), its place in `topics`, 1 when words of a batch follow (kv_events.h says how
   * they lie), or 0: its payload is the next of `payloads`. So many words in all; `kvEventsWords` has them.
   */
  readonly wordCount: number;
  readonly messages: number;
  readonly topics: readonly string[];
  readonly payloads: readonly Buffer[];
  /** The last message's payload in any case. */
  readonly last: Buffer;
  /** Messages that are not of this protocol. */
  readonly foreign: number;
  /** Connections that ended before the last of these messages, or at least before the next one. */
  readonly disconnects: number;
  /** Connections that were made. */
  readonly handshakes: number;
  /** After all of these. */
  readonly connected: boolean;
}

export interface NativeBinding {
  // -- identity (binding_identity.cc) ---------------------------------------------------------------------------
  /**
   * Chained block hashes of a whole prompt in one call.
   * `algorithm`: 0 sha256 · 1 sha256_cbor · 2 xxhash · 3 xxhash_cbor. `parent`: the root or the last hash so far.
   * `tokens`: count × blockTokens ids, 64 bits wide where an id does not fit into 32. `extras`: one per block, the extra keys already serialised for this algorithm
   * (CBOR array or pickle tuple), or null for none; `null` when no block has any.
   * `out`: receives count × hashBytes bytes. Returns the count.
   */
  hashBlocks(
    algorithm: number,
    parent: Uint8Array,
    tokens: Uint32Array | BigUint64Array,
    blockTokens: number,
    extras: (Uint8Array | null)[] | null,
    out: Uint8Array,
  ): number;
  /** One-shot digests: SHA-256 (32 bytes), XXH3-128 (16 bytes big-endian), XXH3-64. */
  sha256(bytes: Uint8Array): Uint8Array;
  xxh3_128(bytes: Uint8Array): Uint8Array;
  xxh3_64(bytes: Uint8Array): bigint;

  // -- tokens (binding_tokens.cc) -----------------------------------------------------------------------------------
  /**
   * A list of JSON's whole numbers of 32 bits, one at least, from behind the bracket that opens it; `end`: one past the bracket that closes
   * it. null: it is none.
   */
  readIds(text: Uint8Array, from: number): { readonly ids: Uint32Array<ArrayBuffer>; readonly end: number } | null;
  /** As protobuf packs uint32, and back; null: numbers beyond 32 bits, or an end within one. */
  packIds(ids: Uint32Array): Buffer<ArrayBuffer>;
  unpackIds(bytes: Uint8Array): Uint32Array<ArrayBuffer> | null;

  // -- events (binding_events.cc) ---------------------------------------------------------------------------------
  /**
   * A batch of KV events as msgpack. `words`: `count` words of `events` records (kv_events.h says how they lie). `rank`: -1 for nil.
   * `kinds`: names of kinds of attention, each one byte of length and its text. `objects`: the events that have no record, encoded,
   * in their order; null: none. Written to `out` from `at` on; returns how many bytes, 0 when there may be too few.
   */
  encodeKvEvents(
    words: Uint32Array,
    count: number,
    events: number,
    ts: number,
    rank: number,
    asArray: boolean,
    fullHashes: boolean,
    kinds: Uint8Array,
    objects: Uint8Array[] | null,
    out: Uint8Array,
    at: number,
  ): number;
  /**
   * The other way: a batch as words (kv_events.h says how they lie), written to `out` from word `at` on. `tokens`: with the ids of tokens.
   * `names`: of media and localities, each one byte of length and its text. Returns how many words; 0: `out` is too small; -1: a
   * batch of another form or with another name, which the decoder of objects is to read.
   */
  decodeKvEvents(payload: Uint8Array, tokens: boolean, names: Uint8Array, out: Int32Array, at: number): number;
  /** At least `bytes`, of any contents, in huge pages where the kernel has some. Throws when there is no memory. */
  allocatePages(bytes: number): ArrayBuffer;
  /** The same, each page written once by a thread of its own, so that the first write to it here costs nothing. */
  preparePages(bytes: number): Promise<ArrayBuffer>;
  /**
   * Of these pages, so many bytes more may be kept for the next user when they are collected, in slabs of 2 MiB; fewer when negative, and
   * what is kept beyond is given back now.
   */
  keepPages(bytes: number): void;

  // -- receiver of KV events (binding_receiver.cc) ------------------------------------------------------------------
  /**
   * Subscribes over ZeroMQ, whose library `zeromq` must have loaded. Keys are Z85 text, '' for none.
   * Throws a RangeError for an endpoint that cannot be.
   */
  kvEventsOpen(options: {
    endpoint: string;
    topic: string;
    highWaterMark: number;
    maxMessageBytes: number;
    ipv6: boolean;
    heartbeatMs: number;
    serverKey: string;
    publicKey: string;
    secretKey: string;
  }): KvEventsHandle;
  /**
   * What has come, as soon as something has; nothing is taken before it is asked for. One call at a time. `names`, `tokens`: as for
   * decodeKvEvents; null: payloads, not words. Resolves to null when it is closed.
   */
  kvEventsNext(events: KvEventsHandle, names: Uint8Array | null, tokens: boolean): Promise<KvEventBurst | null>;
  /** Copies words of the last burst, before the next one is asked for. As many as there are or as fit; 0: closed meanwhile. */
  kvEventsWords(events: KvEventsHandle, into: Int32Array): number;
  /** Who waits gets null. */
  kvEventsClose(events: KvEventsHandle): void;

  // -- arena (binding_arena.cc) ---------------------------------------------------------------------------------
  /**
   * Create the shared file at `path` (mode 0600, must not exist), flock it for as long as it is mapped, reserve all of `bytes` (posix_fallocate: a full
   * /dev/shm is an error here, never a SIGBUS later), map it, touch its pages with `threads` threads.
   * Its first page holds a magic, the format version, `bytes` and a random `id`.
   */
  arenaCreate(path: string, bytes: number, threads: number): ArenaHandle;
  /** Map an existing arena; refuses a wrong magic, size or id. */
  arenaOpen(path: string, bytes: number, id: bigint): ArenaHandle;
  arenaId(arena: ArenaHandle): bigint;
  /** Unmap now. Offsets in flight must have ended. The creator unlinks the file itself. */
  arenaClose(arena: ArenaHandle): void;
  /** Copy bytes in and out: headers and tests only, never payloads on a hot path (law 4). */
  arenaWrite(arena: ArenaHandle, offset: number, bytes: Uint8Array): void;
  arenaRead(arena: ArenaHandle, offset: number, bytes: number): Buffer;
  /**
   * The arena's own memory as a Buffer, without a copy: for sockets that receive into it and send out of it. It keeps the
   * mapping alive, not the slot: whoever holds the slot decides how long it may be used. About 1 µs: one per transfer.
   */
  arenaView(arena: ArenaHandle, offset: number, bytes: number): Buffer;
  /**
   * Verify whole objects in slots, off the JavaScript thread: header, namespace, hash (64 bytes of identity a slot, as for
   * `arenaObjects`), length and payload checksum. `bytes`: how many arrived in each slot. Returns one byte a slot: 0 sound,
   * else the `HeaderFault` of object_header.h.
   */
  arenaVerify(
    arena: ArenaHandle,
    slots: Float64Array,
    bytes: Float64Array,
    identities: Uint8Array,
  ): Promise<Uint8Array>;
  /** Copy within the arena, off the JavaScript thread: `count` pieces of `bytes` each. */
  arenaCopy(arena: ArenaHandle, sources: Float64Array, targets: Float64Array, bytes: number): Promise<void>;
  /** XXH3-64 of pieces, off the JavaScript thread. */
  arenaChecksum(arena: ArenaHandle, offsets: Float64Array, bytes: number): Promise<BigUint64Array>;
  /**
   * Bytes (whole pages) of the objects in `slots`; 0 where the header is not sound or not that of the identity: 64 bytes a
   * slot, namespace digest and hash zero padded to 32.
   */
  arenaObjects(arena: ArenaHandle, slots: Float64Array, identities: Uint8Array): Float64Array;

  // -- codec (binding_codec.cc) ---------------------------------------------------------------------------------
  /**
   * The byte planes of `bytes` at `offset`, taken as elements of `width` (2 or 4) bytes: all first bytes, then all second
   * bytes, and so on. Off the JavaScript thread.
   */
  arenaSplitPlanes(arena: ArenaHandle, offset: number, bytes: number, width: number): Promise<Buffer>;
  /** The inverse: one plane for each byte of an element, all of one length, none of them in the target. */
  arenaJoinPlanes(arena: ArenaHandle, offset: number, planes: readonly Uint8Array[]): Promise<void>;

  // -- files (binding_io.cc) ------------------------------------------------------------------------------------
  /**
   * flock(LOCK_EX | LOCK_NB) on `path`, created 0600; the lock lives until `unlock` or the process ends. Throws LOCKED, or IO with `errno`.
   */
  lockFile(path: string): number;
  unlock(lock: number): void;
  /** The first bytes of an open file as memory. They have to be there: the file must not become shorter. Throws IO. */
  mapShared(fd: number, bytes: number): MappingHandle;
  /** One byte of it, which other processes see at once. Throws SETUP: it is not mapped. */
  putShared(mapping: MappingHandle, at: number, byte: number): void;
  /**
   * One byte of an open file for each byte of `out`: of hash i the one at `at` + (its first word ^ `tag` & `mask`). Returns how many there
   * were, up to the first that cannot be read.
   */
  readBuckets(
    fd: number,
    at: number,
    mask: number,
    tag: number,
    hashes: Uint8Array,
    hashBytes: number,
    out: Uint8Array,
  ): number;
  unmapShared(mapping: MappingHandle): void;
  /**
   * A shared lock of the open file description on one byte of a file, until `fd` and its copies are closed; false: it cannot be had. And
   * whether somebody holds one by another description: true also when that cannot be asked.
   */
  holdByte(fd: number, byte: number): boolean;
  isByteHeld(fd: number, byte: number): boolean;
  /** Credentials of the process at the other end of a Unix socket. */
  peerCredentials(fd: number): { pid: number; uid: number };
  /** SO_PEERGROUPS of a connected Unix socket, and its primary group. Throws IO. */
  peerGroups(fd: number): number[];

  // -- calls to the file system of a device (binding_files.cc) --------------------------------------------------
  /**
   * A thread for the calls to one file system, which happen one after another there. One that hangs holds up those behind it
   * and nobody else: not the process, not libuv's pool, not the process's end. All reject with "IO: path: what (why)" and
   * with `errno` (positive).
   */
  filesOpen(): FilesHandle;
  /** No more calls; the thread ends after those that were made. Returns at once. */
  filesClose(files: FilesHandle): void;
  /** Make a folder, and `withParents` those above it (0700), where they are not there. */
  fileFolder(files: FilesHandle, path: string, withParents: boolean): Promise<void>;
  /** Which file lies at `path`; null: none does. */
  fileIdentity(files: FilesHandle, path: string): Promise<FileIdentity | null>;
  /** `lockFile` on that thread, of a file that is still there; rejects with LOCKED, without `errno`, where another one has it. */
  fileLock(files: FilesHandle, path: string): Promise<FileIdentity & { readonly lock: number }>;
  /** Names in a folder. */
  fileNames(files: FilesHandle, path: string): Promise<string[]>;
  /** Size of a file; 0 of what is no file, -1 when there is none. */
  fileBytes(files: FilesHandle, path: string): Promise<number>;
  /** Bytes from `position` on, fewer where the file ends. */
  fileRead(files: FilesHandle, path: string, position: number, bytes: number): Promise<Buffer>;
  /**
   * Write pieces of one size into an existing file, one at each position; `bytes` holds them all, and may be used anew when this
   * returns. `paddedBytes`: of each piece, with zeros behind it. One open file for all.
   */
  fileWrite(
    files: FilesHandle,
    path: string,
    positions: Float64Array,
    bytes: Uint8Array,
    paddedBytes?: number,
  ): Promise<void>;
  /** Make a file (0600) with these bytes, or replace its contents. */
  fileMake(files: FilesHandle, path: string, bytes: Uint8Array): Promise<void>;
  /**
   * Create a file of `bytes` (must not exist, 0600) and write zeros all over it: writes into space that was written before are 2
   * to 10 times as fast. Leaves nothing behind when it rejects.
   */
  filePrepare(files: FilesHandle, path: string, bytes: number): Promise<void>;
  fileRename(files: FilesHandle, from: string, to: string): Promise<void>;
  /** Nothing happens when there is none. */
  fileRemove(files: FilesHandle, path: string): Promise<void>;

  // -- I/O (binding_io.cc) --------------------------------------------------------------------------------------
  /**
   * An asynchronous O_DIRECT reader and writer between files and one arena. `backend` "auto" takes io_uring (registered
   * arena memory, registered files) where the kernel allows it, else "threads".
   * `onComplete` is called on the JavaScript thread with parallel arrays, many completions at a time:
   * tags as given, and results: bytes moved, or a negative errno, or -EBADMSG (-74) when `verify` failed, or
   * -EPROTONOSUPPORT (-93) for a sound object of a newer program.
   */
  ioOpen(
    arena: ArenaHandle,
    options: { backend: 'auto' | 'io_uring' | 'threads'; depth: number; ioBytes: number },
    onComplete: (tags: Float64Array, results: Float64Array) => void,
  ): IoHandle;
  /** Which backend it became, and why not io_uring ("" if it is). */
  ioBackend(io: IoHandle): { backend: 'io_uring' | 'threads'; reason: string };
  /** Open a file for O_DIRECT I/O; returns a file number of this queue. `create` preallocates `bytes`. */
  ioOpenFile(io: IoHandle, path: string, options: { create: boolean; bytes: number }): number;
  /** Open an existing file for O_DIRECT I/O on the thread of `files`; resolves with its number in this engine. */
  ioTakeFile(io: IoHandle, files: FilesHandle, path: string): Promise<number>;
  /** With `files`: its close(2) happens on that thread. */
  ioCloseFile(io: IoHandle, file: number, files?: FilesHandle): void;
  /**
   * Submit operations, one row of 6 numbers each: [tag, kind, file, fileOffset, arenaOffset, bytes]. Kinds: 0 read ·
   * 1 write · 2 verified read of one object · 3 write of one object with its header's `sequence` set on the way; the slot stays as it is. All 4096-aligned. Adjacent rows that continue each other in the file travel as one
   * vectored I/O; rows larger than `ioBytes` are split. Rows complete singly. Returns at once.
   * `identities`: 64 bytes a row, needed for kinds 2 and 3. Kind 2: namespace digest, then the hash zero padded to 32; the
   * object's header, namespace, hash, length and payload checksum are verified before the row completes, and its `sequence` becomes 0. Kind 3: the
   * sequence as a u64, little-endian; the rest is ignored.
   */
  ioSubmit(io: IoHandle, rows: Float64Array, identities?: Uint8Array): void;
  /** Waits for everything in flight, then frees the queue. */
  ioClose(io: IoHandle): Promise<void>;
  /** For a device that hangs: leave the queue, its thread and its files behind until the process ends. Nothing completes. */
  ioAbandon(io: IoHandle): void;
  /**
   * For tests: `errno` > 0 is what transfers end with from now on, for reads (1), writes (2) or both (3) by `kinds`; with
   * `hold` completions are kept back, as a device does that hangs, until a call without. All else of the path is the real one.
   */
  ioFault(io: IoHandle, kinds: number, errno: number, hold: boolean): void;

  // -- peers (binding_peer.cc) ----------------------------------------------------------------------------------
  /**
   * The data plane between nodes: objects out of one arena into another over TCP. `tls`: TLS 1.3 with the session's key as
   * pre-shared key; otherwise plain, both ends authenticated by HMAC. `maxConnections`: that peers may open, beside
   * `maxStrangers` that have not proved themselves. `stallMs`: how long half a frame, or bytes that nobody takes may last; a
   * handshake at most 3 s.
   * `onEvents`: rows of 4 numbers, many at a time. 0 fetched: tag, result (0 ready, 1 missing, 2 failed, 3 corrupt) ·
   * 1 request: token, connection, slotBytes; its 64 bytes of identity are the next in `identities` · 2 sent: token, 1 if all
   * of it · 3 up: connection · 4 down: connection, end · 5 refused: connection, end. Ends: 0 ended, 1 unauthenticated,
   * 2 protocol, 3 time limit, 4 too many.
   */
  peerOpen(
    arena: ArenaHandle,
    options: { threads: number; tls: boolean; maxConnections: number; maxStrangers: number; stallMs: number },
    onEvents: (rows: Float64Array, identities: Buffer) => void,
  ): PeerHandle;
  /** Listen on an IP address; returns the port. Throws IO or CONFIG. */
  peerListen(peer: PeerHandle, host: string, port: number): number;
  /** A session (16 bytes) may open data connections with this key (32 bytes); until revoked, which ends them. */
  peerAllow(peer: PeerHandle, session: Uint8Array, key: Uint8Array): void;
  peerRevoke(peer: PeerHandle, session: Uint8Array): void;
  /** Open a connection; it will be up or down. Returns its number. */
  peerConnect(peer: PeerHandle, host: string, port: number, session: Uint8Array, key: Uint8Array): number;
  peerDisconnect(peer: PeerHandle, connection: number): void;
  /**
   * Fetch objects into slots over a connection that is up. Rows of 5: [tag, slot, slotBytes, limitMs, index], where index counts
   * the 64 bytes of `identities` that name it. Each ends in one event; after that nothing writes into its slot. A row past its
   * limit ends the connection.
   */
  peerFetch(peer: PeerHandle, connection: number, rows: Float64Array, identities: Uint8Array): void;
  /**
   * Answer requests. Rows of 5: [token, connection, status (0 ready, 1 missing, 2 failed), slot, objectBytes]. A ready one's
   * slot must stay as it is until its "sent".
   */
  peerAnswer(peer: PeerHandle, rows: Float64Array): void;
  /** Ends all connections, delivers the last events, frees it. */
  peerClose(peer: PeerHandle): Promise<void>;

  // -- Redis values (binding_value.cc) ---------------------------------------------------------------------------
  /**
   * Values between arena slots and Redis servers, on a thread of its own. `onEvent`: 0 ready: connection · 1 down: connection;
   * text: why · 2 moved: tag, results, a digit for each value (0 all of it, and for a get verified; 1 a key is not there; 2 not as
   * long as it should be; 3 not the object that it should be; 4 refused: text has the server's error lines, one for each of these;
   * 5 lost: no answer; 6 arrived and is sound, but a newer program's).
   */
  valuesOpen(
    arena: ArenaHandle,
    onEvent: (kind: number, number: number, results: string, text: string) => void,
  ): ValuesHandle;
  /**
   * A server to move values to and from: its number. `login` is what each connection sends first, and is answered by `loginReplies`
   * times +OK. `depth`: commands in flight on one. `pieceBytes`: of one GETRANGE, at first.
   */
  valuesServer(
    values: ValuesHandle,
    login: Uint8Array,
    loginReplies: number,
    depth: number,
    pieceBytes: number,
  ): number;
  /** Open a connection to it, at an IP address or a Unix socket (a path); it will be ready or down. Returns its number. */
  valuesConnect(values: ValuesHandle, server: number, host: string, port: number): number;
  /**
   * Move values over whatever connections there are, or will be. Rows of 3: [slot, bytes, partBytes]; a value's keys are `base` + its
   * id + ":0", ":1" ..., of `partBytes` each; `ids` has a space between them. `identities`: 64 bytes a value, and they are read and
   * verified; null, and they are written (SET XX). All end in one event.
   */
  valuesMove(
    values: ValuesHandle,
    server: number,
    tag: number,
    base: string,
    ids: string,
    rows: Float64Array,
    identities: Uint8Array | null,
  ): void;
  /** Whether others use that server, too, as they do at first: what is read comes in small pieces then, else in pieces of 1 MiB. */
  valuesShare(values: ValuesHandle, server: number, isShared: boolean): void;
  /** For tests: which size follows after pieces of `bytes` that took `us` microseconds each. */
  valuesPieceAfter(bytes: number, us: number): number;
  /** What is left of these values is lost, and so is each connection that carries some of it. */
  valuesExpire(values: ValuesHandle, server: number, tag: number): void;
  /** Nothing moves over this connection when this returns; there is no event of it. */
  valuesDisconnect(values: ValuesHandle, connection: number): void;
  /** Nothing moves to or from this server when this returns; what was to move gets no event. */
  valuesShut(values: ValuesHandle, server: number): void;
  /** Ends all connections and the thread; no event follows. */
  valuesClose(values: ValuesHandle): void;

  // -- process (binding_process.cc) -----------------------------------------------------------------------------
  /** _exit(2): ends this process now, whatever hangs in a thread of libuv's (process.exit joins these). Nothing is flushed. */
  exitNow(code: number): never;
  /**
   * SIGKILL for this process in `ms`, whatever its event loop does; `line` goes to stderr before it. The earliest of several calls
   * counts, none can be taken back.
   */
  killAfter(ms: number, line: string): void;
  /** The same, `graceMs` after the end of the process that is our parent now. */
  endWithParent(graceMs: number, line: string): void;
  /** What this thread has computed so far. */
  threadCpuMs(): number;
  /** From now on, and anew at each call: measures the turns of the main thread's event loop. */
  watchTurns(): void;
  /**
   * Since `watchTurns`, of the turns that have ended: the longest in CPU time of this thread, the longest without the wait for events,
   * how many had more than 50 ms of CPU time, and rows of 4 for the first 64 of these: [began, ended, CPU time, pages that were
   * new to it], ms on the monotonic clock (that of process.hrtime).
   */
  turnsSeen(): { longestCpuMs: number; longestWallMs: number; longTurns: number; rows: Float64Array };
  /**
   * From now on a thread writes every 50 ms to 8 bytes of an open file, which it has and which lie in one page, at a multiple of 4: how
   * often it did (u32), and the ms of the main thread's present turn (u32): those that it ran while it could, and all while it was
   * blocked. Throws CONFIG in other threads, IO.
   */
  pulseStart(fd: number, at: number): PulseHandle;
  pulseEnd(pulse: PulseHandle): void;
  /** Remove a file unless somebody holds a flock on it. Returns whether it is gone by us. Throws IO. */
  unlinkUnlocked(path: string): boolean;
  /** Whether somebody holds an exclusive flock on a file that is there. Throws IO. */
  isLocked(path: string): boolean;
}
