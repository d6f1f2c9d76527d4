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
  /** Of layout.ts. */
  readonly layoutFingerprint: Uint8Array;
  /** Default: all heads. */
  readonly tensorParallel?: HeadRange | undefined;
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
