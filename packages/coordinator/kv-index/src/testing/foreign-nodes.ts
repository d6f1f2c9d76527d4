/** Nodes beside engines that name blocks by another root than we do: what they tell, and what of a prompt is at hand beside each. */
import { encodeBatch, type KvEvent, PackedDecoder } from '@kvtier/events';
import { ChainHasher } from '@kvtier/identity';
import { ForeignNames } from '../feed/foreign-names.ts';
import { LieCounts, Lies } from '../feed/lies.ts';
import { mediumNumbers } from '../feed/media.ts';
import { NamesBudget } from '../feed/names-budget.ts';
import { NodeListing } from '../feed/node-listing.ts';
import { SharedBlocks } from '../feed/shared-blocks.ts';
import { type Keys, keysOfHashes } from '../keys.ts';
import { KvIndex } from '../kv-index.ts';

export const blockTokens = 4;
/** Of a prompt, in blocks. */
export const length = 8;
const hasher = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
/** As an engine with another root has them. */
const theirs = new ChainHasher({ algorithm: 'sha256_cbor', blockTokens, rootSeed: 'another' });

export interface Prompt {
  readonly tokens: readonly number[];
  /** The engine's names. */
  readonly hashes: readonly bigint[];
  /** Ours. */
  readonly keys: Keys;
}

/** Of so many blocks; prompts of one seed begin alike. */
export function promptOf(seed: number, blocks = length): Prompt {
  const tokens = Array.from({ length: blocks * blockTokens }, (_, i) => 100_000 * seed + i);
  const packed = theirs.hashBlocks(null, Uint32Array.from(tokens));
  const bytes = theirs.hashBytes;
  const hashes = Array.from({ length: blocks }, (_, i) => packed.readBigUInt64BE((i + 1) * bytes - 8));
  return { tokens, hashes, keys: keysOfHashes(hasher.hashBlocks(null, Uint32Array.from(tokens)), hasher.hashBytes) };
}

/** Namespaces of two ranks. */
export const [first, second] = ['0000000000000001', '0000000000000002'] as const;
const local = { blockSize: blockTokens, loraId: null, loraName: null };

export const described = ({ hashes, tokens }: Prompt, from = 0, to = length, medium = 'CPU'): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes: hashes.slice(from, to), medium, ...local },
  parentBlockHash: from === 0 ? null : hashes[from - 1]!,
  tokenIds: tokens.slice(from * blockTokens, to * blockTokens),
});

export const bare = ({ hashes }: Prompt, from = 0, to = length, medium = 'DISK'): KvEvent => ({
  ...{ type: 'BlockStored', blockHashes: hashes.slice(from, to), medium, ...local },
  ...{ parentBlockHash: null, tokenIds: [] },
});

export const removed = ({ hashes }: Prompt, from = 0, to = length, medium = 'CPU'): KvEvent => ({
  ...{ type: 'BlockRemoved', blockHashes: hashes.slice(from, to), medium },
});

export interface ForeignRigOptions {
  readonly namesBytes?: number;
  readonly maxBlocks?: number;
  /** Of all nodes together; as of each where it is not said. */
  readonly namesBlocks?: number;
  readonly nodes?: number;
}

export function foreignRig(options: ForeignRigOptions = {}) {
  const { namesBytes = 1 << 20, maxBlocks = 1e5, namesBlocks = maxBlocks, nodes = 1 } = options;
  const index = new KvIndex({ maxBytes: 1 << 22, countedMedia: 1 << mediumNumbers.gpu });
  const counts = new LieCounts();
  const lines: string[] = [];
  const log = { info: () => undefined, warn: (_: object, message: string) => void lines.push(message) };
  const shared = new SharedBlocks(index, 1e6, () => undefined);
  const budget = new NamesBudget(namesBytes);
  const told = { unnamed: 0, leftOut: 0 };
  const isHeld = (low: number, high: number): boolean => index.isHeldByAny(low, high);
  const names = new ForeignNames({ hasher, blockTokens, maxBlocks: namesBlocks, budget, isHeld });
  const all = Array.from({ length: nodes }, (_, number) => {
    const lies = new Lies(`cache node ${'nmo'[number]}`, counts, log, () => 0);
    const teller = { resync: () => undefined };
    let changes = 0;
    const listing = new NodeListing({
      onChange: () => {
        changes++;
      },
      ...{ index, blockTokens, maxBlocks, shared, teller, lies, names },
      onUnnamed: (blocks) => {
        told.unnamed += blocks;
      },
      onLeftOut: (blocks) => {
        told.leftOut += blocks;
      },
    });
    const decoder = new PackedDecoder({ tokens: true });
    /** A step for each turn. */
    const saying = (events: readonly KvEvent[], namespace: string = first, ts = 1) => {
      const batch = decoder.decode(encodeBatch({ ts, events, dataParallelRank: null }));
      return listing.apply({ kind: 'batch', seq: 0, topic: `kv@${namespace}`, batch });
    };
    const say = (events: readonly KvEvent[], namespace: string = first, ts = 1): void => {
      for (const _ of saying(events, namespace, ts));
    };
    const begins = (kind: 'snapshot' | 'restarted' = 'snapshot'): void => {
      const item = kind === 'snapshot' ? ({ kind, seq: 0 } as const) : ({ kind, lastSeq: 0 } as const);
      for (const _ of listing.apply(item));
    };
    /** What an engine beside it can load of a prompt. */
    const held = ({ keys }: Prompt): number => {
      const targets = listing.namespaces.map((namespace) => ({
        sources: [listing.partOf(namespace) ?? [], shared.partsOf(teller, namespace)]
          .flat()
          .map(({ source }) => source),
      }));
      return Math.min(
        ...index.match(keys, targets).map(({ blocks }) => blocks),
        targets.length === 0 ? 0 : keys.length / 2,
      );
    };
    return { listing, saying, say, begins, held, changes: () => changes };
  });
  const [one] = all;
  return { ...one!, all, index, budget, names, told, lies: counts.byKind, lines };
}
