/**
 * A cache node, put together: data folder and its lock, arena, tiers, store, session server.
 *
 * Invariant: whatever was opened is closed in reverse order, on a clean end and when a later step of the start fails, so
 * that neither leaves a lock, a shared-memory file or a socket behind.
 */
import { randomBytes } from 'node:crypto';
import { mkdirSync, realpathSync } from 'node:fs';
import path from 'node:path';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { decodeHeader, headerBytes, type Namespace } from '@kvtier/identity';
import { type BlockFields, type Failpoint, type Quotas, Store, ticketOf } from '@kvtier/placement';
import { type Clock, type Log, Watch } from '@kvtier/runtime';
import { SessionServer } from '@kvtier/session';
import type { NodeFigures } from '@kvtier/telemetry/node-metrics';
import { ArenaTier, type ArenaTierOptions, type RedisSettings, type S3Settings, verifyBlocks } from '@kvtier/tiers';
import { type ArenaFile, createArenaFile } from './arena-file.ts';
import { type DiskOptions, openLower, type Placement } from './lower.ts';
import type { NodeMembershipOptions } from './membership.ts';
import type { NodeEventsOptions } from './node-events.ts';
import type { OperationsOptions } from './operations.ts';
import type { PeersOptions } from './peers.ts';
import type { TokenBook } from './token-book.ts';

/** Longer than a step of a prompt's computation takes, also on slow processors; shorter than anybody waits for. */
const diskSettleMs = 1_000;
/** Between two looks whether the arena's file is still there. */
const lookMs = 1_000;
/** Of the watch by which tiers are slow: a turn of twice as long, waits for a processor included, counts for no more. */
const watchMs = 50;

export interface CacheNodeOptions {
  readonly socketPath: string;
  readonly dataDir: string;
  /** Who is in this group may attach, too; null: only our own user and root. */
  readonly group?: number | null;
  readonly arena: { readonly bytes: number; readonly dir: string; readonly eviction?: ArenaTierOptions['policy'] };
  /** null: no disk tier. */
  readonly disk: DiskOptions | null;
  readonly redis?: RedisSettings | null;
  readonly s3?: S3Settings | null;
  readonly peers?: PeersOptions | null;
  /** What the store does with each lower tier, by its name. */
  readonly placement?: Readonly<Record<string, Placement | undefined>>;
  readonly quotas?: Quotas;
  /** null: no KV events are published. */
  readonly kvEvents?: NodeEventsOptions | null;
  /** null: it is not announced to the cluster. */
  readonly membership?: NodeMembershipOptions | null;
  /** Where probes and scrapes ask; null: nothing listens. */
  readonly operations?: OperationsOptions | null;
  readonly clock: Clock;
  readonly log: Log;
  readonly failpoint?: Failpoint | undefined;
  /**
   * Somebody has removed the arena's file: sessions go on, and no other can begin. What the process does about it; told once, from when
   * the node is open. `close`: the node's own.
   */
  readonly onArenaGone?: ((close: () => Promise<void>) => void) | undefined;
  /** `StoreLimits.closeDrainMs`, where the process has not all the time of an end by itself. */
  readonly closeDrainMs?: number | undefined;
  /** What the process counts, for `Stats`. */
  readonly gauges?: () => Readonly<Record<string, number>>;
}

export interface CacheNode {
  readonly arenaPath: string;
  readonly store: Store;
  readonly server: SessionServer;
  /** Of the listener for probes and scrapes. */
  readonly operationsUrl: string | undefined;
  /** Stop accepting, end all sessions, write down what is queued, close the tiers, remove arena and socket. */
  close(): Promise<void>;
}

/** Longer than any read of a tier: each has a limit for itself, and one more for what it tries again. */
export function brokenReadMs({ redis, s3, peers }: Pick<CacheNodeOptions, 'redis' | 's3' | 'peers'>): number {
  const longestMs = Math.max(redis?.timeLimitMs ?? 0, s3?.timeLimitMs ?? 0, peers?.readLimitMs ?? 0);
  return Math.max(60_000, 2 * longestMs + 5_000);
}

/** KvError with one line that says what is wrong and how to mend it; then nothing is left open. */
export async function openCacheNode(options: CacheNodeOptions): Promise<CacheNode> {
  const { clock, log, failpoint } = options;
  const undo: (() => void | Promise<void>)[] = [];
  let whyNotReady: string | undefined = 'starting: arena and tiers are being opened';
  let whyGone: string | undefined;
  let figures = (): NodeFigures => ({ tiers: [], counters: { ...turns(), ...options.gauges?.() } });
  let closing: Promise<void> | undefined;
  const closeAll = async (): Promise<void> => {
    whyNotReady = 'draining: the node ends';
    for (let step = undo.pop(); step !== undefined; step = undo.pop()) await step();
  };
  const close = (): Promise<void> => {
    closing ??= closeAll();
    return closing;
  };
  try {
    const dataDir = makeDataDir(options.dataDir);
    const lock = lockDataDir(dataDir);
    undo.push(() => native.unlock(lock));
    // Before all that takes its time, so that probes hear why; closed after all of it.
    const operations = options.operations
      ? await (await import('./operations.ts')).OperationsServer.open(options.operations, {
          whyNotReady: () => whyGone ?? whyNotReady,
          figures: () => figures(),
          clock,
          log,
        })
      : null;
    if (operations !== null) {
      undo.push(() => operations.close());
      log.info({ url: operations.url }, 'operations: probes and metrics');
    }
    const arenaFile = createArenaFile(options.arena.dir, dataDir, options.arena.bytes, options.group);
    undo.push(() => arenaFile.close());
    await arenaFile.pagesKnown;
    log.info({ bytes: arenaFile.bytes, ...arenaFile.pages() }, 'the arena is reserved');
    if (!arenaFile.isInMemory) {
      log.warn(
        { dir: options.arena.dir },
        'arena.dir is on a disk, to which its blocks are written all the time; name a tmpfs',
      );
    }
    if (arenaFile.removed > 0) log.info({ files: arenaFile.removed }, 'removed the arena of a node that was killed');
    const arena = new ArenaTier({
      arena: arenaFile.handle,
      arenaBytes: arenaFile.bytes,
      nowUs: () => clock.nowUs(),
      policy: options.arena.eviction ?? 'lru',
      detail: () => ({ huge_page_bytes: arenaFile.pages().hugeBytes }),
    });
    const placement = options.placement ?? {};
    const bootEpoch = randomBytes(8).readBigUInt64LE();
    const node = { arena: arenaFile.handle, slots: arena, epoch: bootEpoch, log };
    const events = options.kvEvents
      ? await (await import('./node-events.ts')).NodeEvents.start(options.kvEvents, log)
      : null;
    if (events !== null) undo.push(() => events.close());
    const followsPeers = options.membership?.followPeers !== false && options.membership != null;
    const peers = options.peers ? (await import('./peers.ts')).openPeers(options.peers, node, followsPeers) : null;
    if (peers !== null) undo.push(() => peers.close());
    const lower = await openLower({
      disk: options.disk,
      redis: options.redis ?? null,
      s3: options.s3 ?? null,
      peers: peers?.tier ?? null,
      placement,
      dataDir,
      arena: arenaFile.handle,
      arenaBytes: arenaFile.bytes,
      slots: arena,
      clock,
      log,
    });
    const watch = new Watch(watchMs, () => {});
    undo.push(() => watch.stop());
    const readHeader = (slot: number): BlockFields | undefined => readBlockFields(arenaFile.handle, slot);
    const store = new Store({
      arena,
      lower,
      plans: { ...placement, disk: { ...placement.disk, settleMs: placement.disk?.settleMs ?? diskSettleMs } },
      quotas: options.quotas,
      readHeader,
      verify: (namespace, blocks) => verifyBlocks(arenaFile.handle, namespace, blocks),
      clock,
      runningUs: () => watch.nowMs() * 1000,
      log,
      limits: {
        ...(options.closeDrainMs !== undefined && { closeDrainMs: options.closeDrainMs }),
        brokenReadMs: brokenReadMs(options),
      },
      failpoint,
      held: arenaFile.held ?? undefined,
    });
    undo.push(() => store.close()); // and with it the tiers
    for (const tier of [arena, ...lower]) events?.follow(tier);
    if (peers !== null) {
      const below = lower.find(({ name }) => name === 'disk');
      const endPin = (namespace: Namespace, ticket: Buffer) => void store.endPin(namespace, ticketOf(ticket), null);
      undo.push(await peers.serve(below, (namespace, hash) => store.arriving(namespace, hash, 'disk'), endPin));
    }
    // Redis brings blocks from everywhere, whoever is a peer. What others write to S3 is seen too late for who waits.
    const isShared = options.redis != null;
    const mayCome = (epoch: bigint) => isShared || epoch === bootEpoch || (peers?.mayCome(epoch) ?? false);
    const gauges = () => ({ ...turns(), ...tokensKept(events?.tokens), ...peers?.gauges(), ...options.gauges?.() });
    const server = await SessionServer.listen({
      socketPath: options.socketPath,
      store,
      arenaPath: arenaFile.path,
      arenaBytes: arenaFile.bytes,
      arenaId: arenaFile.id,
      maxPayloadBytes: arena.maxPayloadBytes,
      headerBytes,
      bootEpoch,
      mayCome,
      peerCredentials: (fd) => native.peerCredentials(fd),
      peerGroups: (fd) => native.peerGroups(fd),
      group: options.group ?? null,
      isArenaThere: () => arenaFile.isThere(),
      isByteHeld: (byte) => arenaFile.isByteHeld(byte),
      tellsHeld: arenaFile.held !== null,
      gauges,
      ...(events && { onAttach: (namespace, blockTokens) => events.learn(namespace, blockTokens) }),
      tokens: events?.tokens ?? null,
      clock,
      log,
    });
    undo.push(() => server.close());
    figures = () => {
      const { tiers, counters } = store.stats();
      const sessions = { 'session.open': server.sessions, 'quarantine.open': server.quarantined };
      return { tiers, counters: { ...counters, ...sessions, ...gauges() } };
    };
    if (options.membership) {
      const { followPeers, joinCluster } = await import('./membership.ts');
      const listening = { peer: peers?.listening ?? null, events: events?.source ?? null };
      const isAlone = !isShared && (peers === null || (!followsPeers && options.peers!.peers.length === 0));
      const member = joinCluster(options.membership, listening, log, isAlone);
      undo.push(() => member.close());
      if (peers !== null && followsPeers) {
        const { security } = options.peers!;
        const reader = followPeers(options.membership, peers, security, log, isShared ? undefined : member);
        undo.push(() => reader.close());
      }
    }
    whyNotReady = undefined;
    const onGone = (): void => {
      whyGone = `the arena's file ${arenaFile.path} was removed: no engine can attach`;
      const mend = 'start the node again, and keep cleaners and RemoveIPC of systemd-logind off it (docs/operating.md)';
      log.error({ arena: arenaFile.path }, `the arena's file was removed by somebody else; ${mend}`);
      options.onArenaGone?.(close);
    };
    undo.push(watchArena(arenaFile, clock, onGone));
    return { arenaPath: arenaFile.path, store, server, operationsUrl: operations?.url, close };
  } catch (error) {
    await close();
    throw KvError.from(error, 'SETUP');
  }
}

/** Tells once when the arena's file has gone; the result ends the watch. */
function watchArena(arena: ArenaFile, clock: Clock, onGone: () => void): () => void {
  const look = (): void => {
    if (isGone(arena)) onGone();
    else cancel = clock.after(lookMs, look);
  };
  let cancel = clock.after(lookMs, look);
  return () => cancel();
}

/** Only where the folder says so: one that cannot be read for a moment says nothing. */
function isGone(arena: ArenaFile): boolean {
  try {
    return !arena.isThere();
  } catch {
    return false;
  }
}

function makeDataDir(dataDir: string): string {
  try {
    mkdirSync(dataDir, { recursive: true, mode: 0o700 });
    return realpathSync(dataDir);
  } catch (error) {
    const why = (error as Error).message;
    throw new KvError(
      'SETUP',
      `dataDir: ${dataDir} cannot be made or read (${why}); choose a folder that you may write to`,
    );
  }
}

function lockDataDir(dataDir: string): number {
  try {
    return native.lockFile(path.join(dataDir, 'node.lock'));
  } catch (error) {
    const failure = KvError.from(error);
    if (failure.code !== 'LOCKED') throw failure;
    throw new KvError('LOCKED', `dataDir: ${dataDir} is in use by another cache node (${failure.message})`, {
      cause: error,
    });
  }
}

/** The header that a tier has just verified; undefined when it is not one after all. */
function readBlockFields(arena: ArenaHandle, slot: number): BlockFields | undefined {
  const header = decodeHeader(native.arenaRead(arena, slot, headerBytes));
  if ('error' in header) return undefined;
  const { hash, parent, tokenCount, payloadBytes, payloadChecksum: checksum, expiresS } = header;
  return { hash, parent, tokenCount, payloadBytes, checksum, expiresS };
}

/** What KV events may say besides hashes. */
function tokensKept(tokens: TokenBook | null | undefined): Record<string, number> {
  if (!tokens) return {};
  const { blocks, bytes, dropped } = tokens.stats();
  return { 'kvevents.token_blocks': blocks, 'kvevents.token_bytes': bytes, 'kvevents.token_blocks.dropped': dropped };
}

/** How long this process's event loop lets others wait; measured once a service is ready. */
function turns(): Record<string, number> {
  const { longestCpuMs, longTurns } = native.turnsSeen();
  return { 'turns.longest_us': longestCpuMs * 1_000, 'turns.long': longTurns };
}
