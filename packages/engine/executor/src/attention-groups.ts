/**
 * Layers into attention groups: the layers of a group see the same (all tokens, or one window), share block tables, and
 * lie in one block. All groups take their blocks from one pool, so each block has room for as many layers as the largest
 * group has, and groups are made equally large: as many layers as the rarest kind has (after vLLM's KV-cache groups).
 *
 *     layers   L L L L L G L L L L L G      five local ones to a global one
 *     groups   {5 11} {0 6} {1 7} {2 8} {3 9} {4 10}      one of both global layers, five of two local ones each
 *
 * Invariant: every layer is in exactly one group; a model of one kind of layer has one group with all of them.
 */
import type { KvGroup, NumberType } from './executor.ts';

/** Kinds whose counts differ by less than this share a group size; the smaller one wastes the difference. */
const paddedShare = 1.25;

/** `windows`: per layer, the tokens that it sees; 0 = all. Groups that see everything come first. */
export function attentionGroups(windows: readonly number[]): KvGroup[] {
  const byWindow = new Map<number, number[]>();
  windows.forEach((window, layer) => {
    byWindow.set(window, [...(byWindow.get(window) ?? []), layer]);
  });
  const counts = [...byWindow.values()].map((layers) => layers.length);
  const least = Math.min(...counts);
  const most = Math.max(...counts);
  const groupLayers = most < least * paddedShare ? most : least;
  return [...byWindow]
    .sort(([a], [b]) => a - b)
    .flatMap(([windowTokens, layers]) => {
      const groups = Math.ceil(layers.length / groupLayers);
      // Dealt out in turn, so that the groups of one kind differ by one layer at most.
      return Array.from({ length: groups }, (_, group) => ({
        windowTokens,
        layers: layers.filter((_, at) => at % groups === group),
      }));
    });
}

/** Layers that a block has room for. */
export function blockLayers(groups: readonly KvGroup[]): number {
  return Math.max(...groups.map(({ layers }) => layers.length));
}

/** Bytes of one number. */
export const numberBytes: Readonly<Record<NumberType, number>> = { f32: 4, f16: 2, bf16: 2, e4m3: 1 };

/** Bytes of one block: [layer][K, V][kv head][token][head dim]. */
export function kvBlockBytes(
  model: { readonly windows: readonly number[]; readonly kvHeads: number; readonly headDim: number },
  blockTokens: number,
  dtype: NumberType = 'f32',
): number {
  const layers = blockLayers(attentionGroups(model.windows));
  return layers * 2 * model.kvHeads * model.headDim * blockTokens * numberBytes[dtype];
}
