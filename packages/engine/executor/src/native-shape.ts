/** What native code must know of a model's configuration: numbers only. */

import type { ModelConfig } from '@kvtier/model';
import { attentionGroups, blockLayers } from './attention-groups.ts';
import type { NativeShape } from './binding.ts';

export function nativeShape(config: ModelConfig): NativeShape {
  const groups = attentionGroups(config.windows);
  const { rope, localRope } = config;
  return {
    ...config,
    normOffset: config.normOffset ?? 0,
    attentionScale: config.attentionScale ?? 1 / Math.sqrt(config.headDim),
    embeddingScale: config.embeddingScale ?? 1,
    logitCap: config.logitCap ?? 0,
    gelu: config.gelu ?? false,
    ropes: localRope ? [rope, localRope] : [rope],
    layerKinds: config.windows.map((windowTokens, layer) => {
      const group = groups.findIndex(({ layers }) => layers.includes(layer));
      return {
        windowTokens,
        rope: localRope && windowTokens > 0 ? 1 : 0,
        group,
        slot: groups[group]!.layers.indexOf(layer),
      };
    }),
    groups: groups.length,
    blockLayers: blockLayers(groups),
  };
}
