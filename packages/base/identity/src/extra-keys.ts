/**
 * Extra keys: what makes two blocks with equal tokens different. Order and rules are those of vLLM V1's
 * `generate_block_hash_extra_keys`: [adapter] + [(content hash, offset − block start) ...] + [salt, block 0 only] +
 * [digest of the block's prompt embeddings]; nothing at all is None.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import { isCbor } from './algorithm.ts';
import { encodeCbor, encodePicklePart, type HashValue } from './encode.ts';
import type { HashAlgorithm } from './types.ts';

/** One multimodal input among the tokens. */
export interface MmFeature {
  /** The processor's content hash, at full width (or the user's uuid). */
  readonly identifier: string;
  /** First placeholder token. */
  readonly offset: number;
  /** Placeholder tokens. */
  readonly length: number;
}

/** Prompt embeddings: rows of `rowBytes` bytes in their native dtype, one per prompt token. */
export interface PromptEmbeds {
  readonly rows: Uint8Array;
  readonly rowBytes: number;
}

/** What a request adds to the identity of its blocks. */
export interface RequestIdentity {
  /** Content digest of the LoRA adapter; its hex text is the key, and wins over the name. */
  readonly loraDigest?: Uint8Array | undefined;
  /** The adapter's name, as vLLM has it. Only safe where names are never reused for other weights. */
  readonly loraName?: string | undefined;
  /** The tenant's salt; "" is none. It is in the first block's key, and the chain carries it on. */
  readonly cacheSalt?: string | undefined;
  /** Sorted by offset. */
  readonly mmFeatures?: readonly MmFeature[] | undefined;
  readonly promptEmbeds?: PromptEmbeds | undefined;
  /**
   * What hashing that resumes in the middle of the prompt considers. 'vllm' (default): the last multimodal input only, as
   * vLLM does, so that hashes are equal everywhere. 'exact': every input. They differ only where several inputs end in a
   * block that was not yet full when the prompt ended; there, 'vllm' cannot tell the earlier inputs apart.
   */
  readonly mmResume?: 'vllm' | 'exact' | undefined;
}

/** Extra keys of consecutive blocks of one request. Holds the position in the multimodal inputs. */
export class ExtraKeys {
  readonly #lora: string | undefined;
  readonly #salt: string | undefined;
  readonly #features: readonly MmFeature[];
  readonly #embeds: PromptEmbeds | undefined;
  readonly #featureEnd: number;
  readonly #resumeAtLast: boolean;
  #feature = 0;

  constructor(identity: RequestIdentity) {
    this.#lora = identity.loraDigest ? Buffer.from(identity.loraDigest).toString('hex') : identity.loraName;
    this.#salt = identity.cacheSalt || undefined;
    this.#features = identity.mmFeatures ?? [];
    this.#embeds = identity.promptEmbeds;
    this.#resumeAtLast = identity.mmResume !== 'exact';
    for (let i = 1; i < this.#features.length; i++) {
      invariant(this.#features[i]!.offset >= this.#features[i - 1]!.offset, 'multimodal features are not sorted');
    }
    const last = this.#features.at(-1);
    this.#featureEnd = last ? last.offset + last.length : 0;
  }

  /** No block of this request has extra keys. */
  get none(): boolean {
    return !this.#lora && !this.#salt && this.#features.length === 0 && !this.#embeds;
  }

  /** A run of blocks begins at token `start`: see mmResume. */
  beginRun(start: number): void {
    this.#feature = start > 0 && this.#resumeAtLast ? Math.max(this.#features.length - 1, 0) : 0;
  }

  /** Keys of the block of tokens [start, end), or null. Blocks are asked for in order. */
  next(start: number, end: number): HashValue[] | null {
    const keys: HashValue[] = this.#lora === undefined ? [] : [this.#lora];
    this.#pushFeatures(keys, start, end);
    if (start === 0 && this.#salt !== undefined) keys.push(this.#salt);
    if (this.#embeds) {
      const { rows, rowBytes } = this.#embeds;
      keys.push(native.sha256(rows.subarray(start * rowBytes, end * rowBytes)));
    }
    return keys.length === 0 ? null : keys;
  }

  #pushFeatures(keys: HashValue[], start: number, end: number): void {
    if (this.#featureEnd <= start) return;
    for (; this.#feature < this.#features.length; this.#feature++) {
      const { identifier, offset, length } = this.#features[this.#feature]!;
      if (end <= offset) return;
      if (start >= offset + length) continue;
      keys.push([identifier, offset - start]);
      if (end < offset + length) return;
    }
  }
}

/** Extra keys as the native hasher takes them: a CBOR array, or a pickled tuple inside (parent, tokens, extra). */
export function serializeExtraKeys(algorithm: HashAlgorithm, keys: readonly HashValue[]): Buffer {
  // In the pickle, the parent and the token tuple were memoised before.
  return isCbor(algorithm) ? encodeCbor(keys) : encodePicklePart(keys, 2);
}
