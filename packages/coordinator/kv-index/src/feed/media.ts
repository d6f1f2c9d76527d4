/**
 * The names that publishers have for where a block lies, as the index's numbers: vLLM's and our own tiers, and what SGLang calls its
 * host memory. The lowest number that holds a block is the one that counts, so they stand in the order of what is nearest.
 */
export const mediumNumbers = { gpu: 0, cpu: 1, disk: 2, peer: 3, redis: 4, s3: 5 } as const;

/** Media that belong to nobody: one copy for the whole cluster. */
export const sharedMedia: readonly number[] = [mediumNumbers.redis, mediumNumbers.s3];

const numbers = new Map<string, number>([
  ...Object.entries(mediumNumbers),
  ['cpu_pinned', mediumNumbers.cpu],
  ['cpu_tier1', mediumNumbers.cpu],
  ['cpu_tier2', mediumNumbers.cpu],
  ['arena', mediumNumbers.cpu],
  ['host', mediumNumbers.cpu],
  ['nvme', mediumNumbers.disk],
  ['fs', mediumNumbers.disk],
  ['storage', mediumNumbers.disk],
]);
/** What SGLang calls a pool that many share: who reaches it is not said. */
const external = 'external';

/** undefined: not one that we know. */
export const mediumOf = (name: string): number | undefined => numbers.get(name.toLowerCase());

/** Not a lie, and of no use. */
export const isExternal = (name: string | undefined): boolean => name?.toLowerCase() === external;
