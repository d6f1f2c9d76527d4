/** Identity: how a block is named, everywhere (law 6). Hashes, extra keys, namespaces, and the header of a stored object. */
export { defaultRootSeed, hashValue, parseHashAlgorithm, rootHash, serialize } from './algorithm.ts';
export { ChainHasher, SequenceHashes, type TokenIds } from './chain.ts';
export { encodeCbor, type HashValue } from './encode.ts';
export type { MmFeature, PromptEmbeds, RequestIdentity } from './extra-keys.ts';
export {
  decodeHeader,
  encodeHeader,
  expiresOffset,
  type Header,
  type HeaderFault,
  type HeaderFields,
  headerBytes,
  isNewer,
  sequenceOffset,
  slotAlignment,
  slotBytesFor,
} from './header.ts';
export { groupKey, hashKeyAt, hashKeyOf, hashOfKey, integerForm, packHashKeys, unpackHashKeys } from './keys.ts';
export {
  type BlockLayout,
  type KeysAndValues,
  keysAndValues,
  type LayerRun,
  type LayoutPart,
  layoutFingerprint,
  type SaidLayout,
} from './layout.ts';
export { type HeadRange, type NamespaceFields, namespaceFromDigest, namespaceOf } from './namespace.ts';
export { type TextFile, textDigestOf, textFiles, tokenFiles } from './text-digest.ts';
export type * from './types.ts';
