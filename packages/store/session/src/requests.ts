/**
 * What a session does with each request: proto in, store call, proto out. Synchronous but for Load, whose answers come
 * through `send`, and for what is done to many blocks, which takes several steps. Throws KvError; the connection turns it into a
 * KvFailure, and PROTOCOL into its end.
 */
import { Buffer } from 'node:buffer';
import { KvError } from '@kvtier/errors';
import type { HashKey } from '@kvtier/identity';
import { type Holdings, type LoadEvents, type LookupResult, type Steps, type Store, stepping } from '@kvtier/placement';
import { type ClientFrame, type Load as LoadRequest, ReserveStatus, type ServerFrame } from '@kvtier/wire';
import { checkHashes, unpackHashes, unpackParent, unpackTicket } from './hashes.ts';
import type { SessionLimits } from './limits.ts';
import type { TokenSink } from './options.ts';

export type ClientBody = NonNullable<ClientFrame['body']>;
export type ServerBody = NonNullable<ServerFrame['body']>;

export interface RequestContext {
  readonly store: Store;
  readonly holdings: Holdings;
  readonly hashBytes: number;
  /** A slot is header + payload; offsets on the link point at the payload. */
  readonly headerBytes: number;
  readonly blockTokens: number;
  /** Where token ids go; null: nobody wants them. */
  readonly tokens: TokenSink | null;
  readonly limits: SessionLimits;
  /** The engine's processes hold this byte of the arena's lock file. False: they do not. */
  readonly hold: (byte: number) => boolean;
  /** Whether blocks of the node with this boot epoch can come here. */
  readonly mayCome: (epoch: bigint) => boolean;
  /** Counters of the server itself, for Stats. */
  readonly gauges: () => Readonly<Record<string, number>>;
  readonly send: (id: bigint, body: ServerBody) => void;
  /** The answer comes out of these steps; what the session asks later waits for it. */
  readonly goOn: (id: bigint, steps: Steps<ServerBody>) => void;
}

const statuses = {
  reserved: ReserveStatus.RESERVE_STATUS_RESERVED,
  held: ReserveStatus.RESERVE_STATUS_HELD,
  busy: ReserveStatus.RESERVE_STATUS_BUSY,
  refused: ReserveStatus.RESERVE_STATUS_REFUSED,
} as const;

/**
 * The answer, or the steps that lead to it; undefined where it comes later: a Load's through `send`, a Reserve's of blocks that are
 * being looked at through `goOn`.
 */
export function answer(
  context: RequestContext,
  id: bigint,
  request: ClientBody,
): ServerBody | Steps<ServerBody> | undefined {
  const { holdings, headerBytes, goOn } = context;
  const hashesOf = (packed: Buffer) => unpackHashes(packed, context.hashBytes, context.limits.maxHashes, request.$case);
  const slotsOf = (offsets: readonly bigint[]) => offsets.map((offset) => Number(offset) - headerBytes);
  switch (request.$case) {
    case 'lookup': {
      const { hashes, gaps } = request.value;
      const { store, hashBytes, limits } = context;
      if (gaps) return found(store.lookingUpAll(holdings.state, hashesOf(hashes)));
      return lookedUp(store.lookup(holdings.state, checkHashes(hashes, hashBytes, limits.maxHashes, request.$case)));
    }
    case 'load':
      load(context, id, request.value);
      return undefined;
    case 'endLoad':
      return done(holdings.endLoad(request.value.loadId) ? 1 : 0);
    case 'reserve': {
      const parent = unpackParent(request.value.parent, context.hashBytes, request.$case);
      const hashes = hashesOf(request.value.hashes);
      const tokensOf = tokenReader(context, hashes.length, request.value.tokenIds);
      const settled = holdings.settled(hashes);
      if (settled === undefined) return reserve(context, parent, hashes, tokensOf);
      void settled.then(() => {
        if (holdings.isConnected) goOn(id, reserve(context, parent, hashes, tokensOf));
      });
      return undefined;
    }
    case 'commit': {
      const { offsets, checksums } = request.value;
      if (offsets.length !== checksums.length) {
        throw new KvError(
          'PROTOCOL',
          `commit: ${offsets.length} offsets but ${checksums.length} checksums; send one each`,
        );
      }
      return counted(holdings.committing(slotsOf(offsets), checksums));
    }
    case 'abort':
      return counted(holdings.aborting(slotsOf(request.value.offsets)));
    case 'release':
      return done(holdings.release(request.value.loadId, request.value.corrupt) ? 1 : 0);
    case 'pin': {
      const { hashes, ttlMs, ticket = Buffer.alloc(0) } = request.value;
      const shown = ticket.length > 0 ? unpackTicket(ticket, 'pin') : undefined;
      return counted(holdings.pinning(hashesOf(hashes), ttlMs, shown));
    }
    case 'endPin': {
      const { ticket, hash } = request.value;
      const held = unpackParent(hash, context.hashBytes, 'endPin');
      return done(context.store.endPin(holdings.state.namespace, unpackTicket(ticket, 'endPin'), held));
    }
    case 'prefetch':
      return { $case: 'prefetching', value: holdings.prefetch(id, hashesOf(request.value.hashes)) };
    case 'cancelPrefetch':
      return done(holdings.cancelPrefetch(request.value.prefetchId));
    case 'unpin':
      return counted(holdings.unpinning(hashesOf(request.value.hashes)));
    case 'hold': {
      const { byte } = request.value;
      if (byte < 1n || byte > BigInt(Number.MAX_SAFE_INTEGER)) {
        throw new KvError('PROTOCOL', `hold: byte ${byte} is not 1 to 2^53 - 1; choose one of these at random`);
      }
      return done(context.hold(Number(byte)) ? 1 : 0);
    }
    case 'stats':
      return { $case: 'stats', value: stats(context) };
    case 'attach':
      throw new KvError(
        'PROTOCOL',
        'attach: this session is attached already; open another connection for another session',
      );
  }
}

const done = (count: number): ServerBody => ({ $case: 'done', value: { count } });

function* counted(steps: Steps<number>): Steps<ServerBody> {
  return done(yield* steps);
}

function lookedUp({ held, spans, estimatedUs }: LookupResult): ServerBody {
  return { $case: 'lookup', value: { held, spans: [...spans], estimatedUs: Math.min(estimatedUs, 0xffff_ffff) } };
}

function* found(steps: Steps<LookupResult>): Steps<ServerBody> {
  return lookedUp(yield* steps);
}

type LearnTokens = (index: number, hash: HashKey, parent: HashKey | null) => void;

/** Keeps the tokens of one block of a Reserve; undefined: none were said, or nobody wants them. KvError PROTOCOL when they do not fit. */
function tokenReader(context: RequestContext, blocks: number, said: Buffer | undefined): LearnTokens | undefined {
  if (said === undefined || said.length === 0) return undefined;
  const { blockTokens, tokens, holdings } = context;
  const blockBytes = 4 * blockTokens;
  if (said.length !== blocks * blockBytes) {
    const what = `${said.length} bytes of token ids for ${blocks} blocks of ${blockTokens} tokens`;
    throw new KvError('PROTOCOL', `reserve: ${what}; send four bytes for each token, or none`);
  }
  if (tokens === null) return undefined;
  const { namespace } = holdings.state;
  return (index, hash, parent) =>
    tokens.learn(namespace, hash, parent, said.subarray(index * blockBytes, (index + 1) * blockBytes));
}

function* reserve(
  { holdings, headerBytes }: RequestContext,
  parent: HashKey | null,
  hashes: readonly HashKey[],
  learn: LearnTokens | undefined,
): Steps<ServerBody> {
  const reserved = yield* holdings.reserving(parent, hashes);
  for (let index = 0; learn !== undefined && index < reserved.length; index++) {
    if (reserved[index]!.status !== 'refused') learn(index, hashes[index]!, index === 0 ? parent : hashes[index - 1]!);
    if ((index + 1) % stepping.blocks === 0) yield;
  }
  const value = {
    status: reserved.map(({ status }) => statuses[status]),
    offsets: reserved.map(({ slot }) => (slot === undefined ? 0n : BigInt(slot + headerBytes))),
    reason: reserved.find(({ reason }) => reason !== '')?.reason ?? '',
  };
  return { $case: 'reserved', value };
}

function load(context: RequestContext, id: bigint, { hashes, deadlineMs, awaitMs, awaitFrom }: LoadRequest): void {
  const { holdings, hashBytes, headerBytes, limits, send } = context;
  const events: LoadEvents = {
    onReady: (first, blocks, tier) => {
      for (let at = 0; at < blocks.length; at += limits.readyBlocks) {
        const part = blocks.slice(at, at + limits.readyBlocks);
        const offsets = part.map((block) => BigInt(block.slot + headerBytes));
        const checksums = part.map((block) => block.checksum);
        send(id, { $case: 'ready', value: { first: first + at, offsets, checksums, tier } });
      }
    },
    onDone: (loaded, reason) => {
      send(id, { $case: 'loadDone', value: { loaded, reason } });
      if (loaded === 0) holdings.release(id, []); // nothing to lease
    },
  };
  const names = unpackHashes(hashes, hashBytes, limits.maxHashes, 'load');
  // What cannot come is not waited for: the engine computes it at once.
  const isAwaited = awaitMs === undefined || awaitFrom === undefined || context.mayCome(awaitFrom);
  if (!isAwaited) context.store.counters.add('await.refused.no_link');
  holdings.load(id, names, deadlineMs, events, isAwaited ? awaitMs : 0);
}

function stats(context: RequestContext): Extract<ServerBody, { $case: 'stats' }>['value'] {
  const { tiers, counters } = context.store.stats();
  const all = Object.entries({ ...counters, ...context.gauges() });
  return {
    tiers: tiers.map((tier) => ({
      tier: tier.tier,
      blocks: BigInt(tier.blocks),
      bytes: BigInt(tier.bytes),
      capacityBytes: BigInt(tier.capacityBytes),
      hits: BigInt(tier.hits),
      misses: BigInt(tier.misses),
      evictions: BigInt(tier.evictions),
      corrupt: BigInt(tier.corrupt),
      inService: tier.inService,
      outOfServiceReason: tier.outOfServiceReason,
      breaker: tier.breaker,
      breakerReason: tier.breakerReason,
      refusals: Object.fromEntries(Object.entries(tier.refusals).map(([reason, count]) => [reason, BigInt(count)])),
      detail: { ...tier.detail },
    })),
    counters: Object.fromEntries(all.map(([name, count]) => [name, BigInt(Math.round(count))])),
  };
}
