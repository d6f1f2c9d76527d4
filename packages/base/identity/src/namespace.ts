/**
 * The namespace: everything that two engines must have in common to share a block, as one digest. Invariant: two engines
 * whose blocks differ in any way that the chain hash does not show have different namespaces. Byte for byte in
 * docs/formats.md ("Namespace"); golden/namespace.json pins it.
 */
import { Buffer } from 'node:buffer';
import { native } from '@kvtier/data-plane';
import { invariant } from '@kvtier/errors';
import { encodeCbor } from './encode.ts';
import type { HashAlgorithm, Namespace } from './types.ts';

/** How KV blocks look in memory; the executor's KvLayout is one. */
export interface BlockLayout {
  readonly layers: number;
  readonly kvHeads: number;
  readonly headDim: number;
  readonly dtype: string;
  readonly blockTokens: number;
  readonly blockBytes: number;
  /** The dimensions, outermost first: "layer,kv,head,token,dim". */
  readonly order: string;
}

/** The KV heads that this engine holds, of all that the model has. */
export interface HeadRange {
  readonly firstHead: number;
  readonly headCount: number;
  readonly totalHeads: number;
}

export interface NamespaceFields {
  /** Content digest of the weights and of what in config.json changes results. */
  readonly modelDigest: Uint8Array;
  readonly kvDtype: string;
  readonly blockTokens: number;
  readonly algorithm: HashAlgorithm;
  /** Root hash of the chains. */
  readonly root: Uint8Array;
  /** Attention group; default 0. */
  readonly group?: number | undefined;
  /** See layoutFingerprint. */
  readonly layoutFingerprint: Uint8Array;
  /** Default: all heads. */
  readonly tensorParallel?: HeadRange | undefined;
}

/** SHA-256, 32 bytes, of a layout. Equal layouts, and only those, may exchange blocks. */
export function layoutFingerprint(layout: BlockLayout): Buffer {
  const { layers, kvHeads, headDim, dtype, blockTokens, blockBytes, order } = layout;
  const fields = { format: 'kvtier-layout-1', layers, kvHeads, headDim, dtype, blockTokens, blockBytes, order };
  return Buffer.from(native.sha256(encodeCbor(fields)));
}

export function namespaceOf(fields: NamespaceFields): Namespace {
  const { tensorParallel: heads } = fields;
  // A range that is the whole is the same as none: a single engine and a group of one share.
  const whole = heads === undefined || (heads.firstHead === 0 && heads.headCount === heads.totalHeads);
  const structure = {
    format: 'kvtier-namespace-1',
    modelDigest: fields.modelDigest,
    kvDtype: fields.kvDtype,
    blockTokens: fields.blockTokens,
    algorithm: fields.algorithm,
    root: fields.root,
    group: fields.group ?? 0,
    layout: fields.layoutFingerprint,
    heads: whole ? null : [heads.firstHead, heads.headCount, heads.totalHeads],
  };
  return namespaceFromDigest(native.sha256(encodeCbor(structure)));
}

/** A namespace that came over the wire or from a header. */
export function namespaceFromDigest(digest: Uint8Array): Namespace {
  invariant(digest.length === 32, () => `a namespace digest of ${digest.length} bytes`);
  const own = Uint8Array.from(digest);
  return { digest: own, key: Buffer.from(own.buffer).toString('latin1') };
}
