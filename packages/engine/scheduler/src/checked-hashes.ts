/**
 * A request's chain under a hash that can be made to collide (xxhash), with the same chain under SHA-256 beside it: the block
 * pool takes two blocks for equal only when both are. Costs what SHA-256 costs; whoever wants that saved uses `sha256_cbor`.
 */
import { ChainHasher, type RequestIdentity, SequenceHashes, type TokenIds } from '@kvtier/identity';

/** The hasher of the digests; undefined where the hash itself is cryptographic. */
export function contentHasher({ algorithm, blockTokens }: ChainHasher): ChainHasher | undefined {
  if (algorithm === 'sha256' || algorithm === 'sha256_cbor') return undefined;
  return new ChainHasher({ algorithm: 'sha256_cbor', blockTokens });
}

export class CheckedHashes extends SequenceHashes {
  readonly contentDigests: SequenceHashes | undefined;

  constructor(hasher: ChainHasher, digester: ChainHasher | undefined, identity: RequestIdentity) {
    super(hasher, identity);
    this.contentDigests = digester && new SequenceHashes(digester, identity);
  }

  override append(tokens: TokenIds): number {
    this.contentDigests?.append(tokens);
    return super.append(tokens);
  }
}
