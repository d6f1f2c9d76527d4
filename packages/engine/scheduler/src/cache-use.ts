/** Where a request's prompt came from, and how long each part took: told with its first token, or with its end when it has none. */
import type { EngineRequest } from './request.ts';
import type { CacheUse } from './types.ts';

export function cacheUseOf(request: EngineRequest, blockTokens: number, nowUs: number): CacheUse {
  const { promptTokens, handOff } = request;
  const tokensByTier: Record<string, number> = {};
  let cachedTokens = 0;
  const add = (tier: string, tokens: number): void => {
    const counted = Math.min(tokens, promptTokens - 1 - cachedTokens); // the last one was computed in any case
    if (counted <= 0) return;
    tokensByTier[tier] = (tokensByTier[tier] ?? 0) + counted;
    cachedTokens += counted;
  };
  add('engine', request.engineHitTokens);
  const ownTokens = cachedTokens;
  for (const [tier, blocks] of Object.entries(request.loadedByTier)) add(tier, blocks * blockTokens);
  const startedUs = request.startedUs ?? request.submittedUs;
  const handOffUs = handOff?.elapsedUs ?? 0;
  return {
    promptTokens,
    cachedTokens,
    tokensByTier,
    queueUs: Math.max(0, Math.round(startedUs - request.submittedUs - request.loadUs - handOffUs)),
    loadUs: Math.round(request.loadUs + request.headWaitUs),
    prefillUs: Math.round(nowUs - startedUs - request.headWaitUs),
    ...(handOff && {
      handedTokens: Math.min(handOff.loadedBlocks * blockTokens, cachedTokens - ownTokens),
      handOffUs: Math.round(handOffUs),
      tailUs: Math.round(nowUs - handOff.endedUs),
    }),
  };
}
