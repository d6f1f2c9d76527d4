/** A request over given tokens, for tests: its hashes stand for its prefixes, one per `hashTokens`. */
import type { BlockHashes, CacheRequest, RequestDescription } from '../request.ts';
import { keyOfTokens } from './key-of-tokens.ts';

export class TokenRequest implements CacheRequest {
  readonly id: string;
  readonly tokens: number[];
  readonly hashTokens: number;
  promptTokens: number;
  computedTokens = 0;
  running = false;
  inFlightTokens = 0;
  reportMode?: 'full';

  constructor(id: string, tokens: readonly number[], hashTokens = 2) {
    this.id = id;
    this.tokens = [...tokens];
    this.promptTokens = tokens.length;
    this.hashTokens = hashTokens;
  }

  get tokenCount(): number {
    return this.tokens.length;
  }

  get hashes(): BlockHashes {
    const { tokens, hashTokens } = this;
    return {
      blockCount: Math.floor(tokens.length / hashTokens),
      keyAt: (block) => keyOfTokens(tokens.slice(0, (block + 1) * hashTokens)),
    };
  }

  get description(): RequestDescription {
    const tokenIds = (first: number, end: number): number[] => this.tokens.slice(first, end);
    return { loraId: null, loraName: null, tokenIds, extraKeys: () => null };
  }
}
