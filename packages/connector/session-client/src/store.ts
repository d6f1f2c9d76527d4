/**
 * One store: reserve slots for the blocks that the node does not have, copy them out, and only then make them visible.
 *
 *      Reserve ──► Reserved ──► exportBlocks ──► bytes no longer needed ──► Commit ──► Done
 *                     │              └─ failed ──► Abort
 *                     └─ too late, or nothing to write ──► (Abort) ──► bytes no longer needed
 *
 * Invariants: Commit names exactly the slots whose copy has completed, with the checksums computed while copying; every
 * other slot that we were given is aborted. `onReleased` fires exactly once, and never while a copy reads the blocks.
 */
import { KvError } from '@kvtier/errors';
import type { Executor } from '@kvtier/executor';
import { type Reserved, ReserveStatus } from '@kvtier/wire';
import { type ConnectorCounters, count } from './counters.ts';
import type { Session } from './session-client.ts';

export interface StoreContext {
  readonly session: Session;
  readonly executor: Pick<Executor, 'exportBlocks'>;
  readonly counters: ConnectorCounters;
  readonly blockBytes: number;
}

export interface StoreOutcome {
  /** Blocks that the node is known to hold, from the first on. */
  readonly held: number;
  /** The one behind them is being written by somebody else. */
  readonly isBusy: boolean;
  /** The node was not asked, as too much was on its way to it, or has not answered in time: it says nothing of these blocks. */
  readonly isLost: boolean;
}

const reserveDeadlineMs = 1_000;
const commitDeadlineMs = 10_000;

/** Statuses other than RESERVED, as they are counted. */
const whyNot: Readonly<Record<number, string>> = {
  [ReserveStatus.RESERVE_STATUS_HELD]: 'held',
  [ReserveStatus.RESERVE_STATUS_BUSY]: 'busy',
  [ReserveStatus.RESERVE_STATUS_REFUSED]: 'refused',
};

/**
 * Store `blockIds.length` blocks. The Reserve is on its way when this returns, so that stores of one chain reserve in
 * the order of the calls. Never rejects; resolves when the node has confirmed or all is lost.
 * @param parent hash before the first block, empty at the root
 * @param tokens of these blocks, for a node that wants them
 */
export async function runStore(
  context: StoreContext,
  parent: Buffer,
  hashes: Buffer,
  blockIds: Int32Array,
  onReleased: () => void,
  tokens?: Int32Array,
): Promise<StoreOutcome> {
  let slots: Slots | undefined;
  let checksums: BigUint64Array | undefined;
  let isLost = false;
  try {
    slots = await reserve(context, parent, hashes, blockIds, tokens);
    if (slots.wire.length > 0) {
      const { session, executor } = context;
      const { ids, offsets } = slots;
      checksums = await session.copy(() => executor.exportBlocks(session.arena, ids, offsets));
    }
  } catch (error) {
    const { code } = KvError.from(error);
    count(context.counters, 'store', code.toLowerCase(), blockIds.length);
    isLost = slots === undefined && (code === 'DEADLINE' || code === 'BUSY');
  }
  onReleased();
  if (slots === undefined) return { held: 0, isBusy: false, isLost };
  if (slots.wire.length > 0 && checksums === undefined) abort(context.session, slots.wire);
  const isCommitted = checksums !== undefined && (await commit(context, slots.wire, [...checksums]));
  const isMissing = (status: ReserveStatus): boolean =>
    status !== ReserveStatus.RESERVE_STATUS_HELD && !(isCommitted && status === ReserveStatus.RESERVE_STATUS_RESERVED);
  const missing = slots.status.findIndex(isMissing);
  if (missing < 0) return { held: slots.status.length, isBusy: false, isLost };
  return { held: missing, isBusy: slots.status[missing] === ReserveStatus.RESERVE_STATUS_BUSY, isLost };
}

interface Slots {
  /** Of each block that was asked for. */
  readonly status: readonly ReserveStatus[];
  /** Of those that were reserved. */
  readonly ids: Int32Array;
  readonly offsets: Float64Array;
  readonly wire: bigint[];
}

async function reserve(
  { session, counters }: StoreContext,
  parent: Buffer,
  hashes: Buffer,
  blockIds: Int32Array,
  tokens: Int32Array | undefined,
): Promise<Slots> {
  const answer = await session.link.call(
    { $case: 'reserve', value: { parent, hashes, ...(tokens && { tokenIds: packedTokens(tokens) }) } },
    'reserved',
    reserveDeadlineMs,
    {
      onLate: (late) => abort(session, givenSlots(late)),
    },
  );
  if (answer.status.length !== blockIds.length || answer.offsets.length !== blockIds.length) {
    const error = new KvError('PROTOCOL', `${answer.status.length} answers to a Reserve of ${blockIds.length} blocks`);
    session.link.end(error);
    throw error;
  }
  for (const status of answer.status) {
    if (status !== ReserveStatus.RESERVE_STATUS_RESERVED) count(counters, 'store', whyNot[status] ?? 'unknown');
  }
  const wire = givenSlots(answer);
  try {
    const given = (_: unknown, i: number): boolean => answer.status[i] === ReserveStatus.RESERVE_STATUS_RESERVED;
    return { status: answer.status, ids: blockIds.filter(given), offsets: session.offsets(wire), wire };
  } catch (error) {
    session.link.end(KvError.from(error));
    throw error;
  }
}

/** u32, little-endian: as they lie in memory. A copy, since the request goes on. */
const packedTokens = ({ buffer, byteOffset, byteLength }: Int32Array): Buffer =>
  Buffer.from(new Uint8Array(buffer, byteOffset, byteLength));

const givenSlots = ({ status, offsets }: Reserved): bigint[] =>
  offsets.filter((_, i) => status[i] === ReserveStatus.RESERVE_STATUS_RESERVED);

function abort(session: Session, offsets: bigint[]): void {
  if (offsets.length === 0) return;
  // Whether it arrives is the node's concern: it takes the slots back itself when the session ends.
  session.link.call({ $case: 'abort', value: { offsets } }, 'done', commitDeadlineMs, { owed: true }).catch(() => {});
}

/** True when the node holds all of them now. */
async function commit(context: StoreContext, offsets: bigint[], checksums: bigint[]): Promise<boolean> {
  const { session, counters, blockBytes } = context;
  try {
    const body = { $case: 'commit', value: { offsets, checksums } } as const;
    const { count: stored } = await session.link.call(body, 'done', commitDeadlineMs, { owed: true });
    counters.storedBlocks += stored;
    counters.storedBytes += stored * blockBytes;
    if (stored < offsets.length) count(counters, 'store', 'commit', offsets.length - stored);
    return stored >= offsets.length;
  } catch (error) {
    // The node may have committed or not: both are right. Not an Abort: that could take back what is visible.
    count(counters, 'store', `commit ${KvError.from(error).code.toLowerCase()}`, offsets.length);
    return false;
  }
}
