/** The events of one batch, as they stand in its words, one after another. */
import { type PackedBatch, record } from '@kvtier/events';
import type { Keys } from '../keys.ts';

export interface PackedEvent {
  /** One of `recordType`. */
  readonly type: number;
  /** As the publisher calls it; undefined: not said. */
  readonly medium: string | undefined;
  /** 0 where none is said. */
  readonly group: number;
  readonly isGroupSaid: boolean;
  /** Views: valid as long as the batch. */
  readonly keys: Keys;
  readonly parent: Keys | undefined;
  /** 0: not said. */
  readonly blockTokens: number;
  readonly kind: string | undefined;
  readonly windowTokens: number | undefined;
  /** An adapter, a salt or an image is part of the hashes. */
  readonly hasExtra: boolean;
  /** Empty: not said, or not asked for. */
  readonly tokens: Int32Array;
}

export function* eventsIn({ words, from, end, names }: PackedBatch): Generator<PackedEvent, void> {
  const nameAt = (at: number): string | undefined => names[words[at]!];
  for (let at = from; at < end; at += words[at + record.length]!) {
    const hashes = at + record.head;
    const parent = hashes + 2 * words[at + record.hashes]!;
    const tokens = parent + 2 * words[at + record.parents]!;
    const windowTokens = words[at + record.window]!;
    yield {
      type: words[at]!,
      medium: nameAt(at + record.medium),
      group: Math.max(0, words[at + record.group]!),
      isGroupSaid: words[at + record.group]! >= 0,
      keys: words.subarray(hashes, parent),
      parent: parent === tokens ? undefined : words.subarray(parent, tokens),
      blockTokens: words[at + record.blockSize]!,
      kind: nameAt(at + record.kind),
      windowTokens: windowTokens > 0 ? windowTokens : undefined,
      hasExtra: words[at + record.extra] === 1,
      tokens: words.subarray(tokens, at + words[at + record.length]!),
    };
  }
}
