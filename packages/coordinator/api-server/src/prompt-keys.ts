/** The names of a prompt's blocks, as the KV index has them: chain hashes, computed natively, and of each the integer form's two words. */
import { ChainHasher, parseHashAlgorithm, SequenceHashes } from '@kvtier/identity';
import { foldsOf, type Keys, keysOfHashes } from '@kvtier/kv-index';

/** How a model's workers name blocks. */
export interface BlockNames {
  readonly blockTokens: number;
  readonly algorithm: string;
  readonly seed: string;
}

const hashers = new Map<string, ChainHasher | undefined>();
/** Kinds of names that are kept; models beyond are hashed by a hasher of their own each time. */
const maxHashers = 64;
const noKeys: Keys = new Int32Array(0);

/** Of its full blocks, under an adapter if one is named, in memory of their own; none where it is not known how blocks are named. */
export function keysOfPrompt(tokens: Uint32Array, names: BlockNames | undefined, cacheSalt = '', loraName = ''): Keys {
  const hasher = names && hasherOf(names);
  if (hasher === undefined) return noKeys.slice();
  if (cacheSalt === '' && loraName === '')
    return toAsk(keysOfHashes(hasher.hashBlocks(null, tokens), hasher.hashBytes));
  const hashes = new SequenceHashes(hasher, {
    ...(cacheSalt !== '' && { cacheSalt }),
    ...(loraName !== '' && { loraName }),
  });
  hashes.append(tokens);
  return toAsk(keysOfHashes(hashes.packed, hasher.hashBytes));
}

/** The index checks a prompt by its folds: they are made here, once, and not while a worker is chosen. */
function toAsk(keys: Keys): Keys {
  foldsOf(keys);
  return keys;
}

function hasherOf({ blockTokens, algorithm, seed }: BlockNames): ChainHasher | undefined {
  const key = `${algorithm} ${blockTokens} ${seed}`;
  if (hashers.has(key)) return hashers.get(key);
  let hasher: ChainHasher | undefined;
  try {
    hasher = new ChainHasher({ algorithm: parseHashAlgorithm(algorithm), blockTokens, rootSeed: seed });
  } catch {
    // A worker that names blocks as nobody else does: what it holds is not known.
  }
  if (hashers.size < maxHashers) hashers.set(key, hasher);
  return hasher;
}
