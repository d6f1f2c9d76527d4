/**
 * What of a publisher's events could not be read: told and counted, and whether anything else ever came. One whose stores were never read
 * seems to hold nothing, whatever it holds: its events tell nothing of it.
 */
import { type PackedBatch, recordType, type StreamItem } from '@kvtier/events';
import type { Lies } from './lies.ts';
import { eventsIn } from './packed-events.ts';

type Item = StreamItem<PackedBatch>;

export function tellUnread(item: Item, lies: Lies): void {
  if (item.kind === 'gap' && item.isUnread) {
    lies.tell('unreadable_batch', () => `a batch that cannot be read, and all before it: ${plain(item.reason)}`);
  } else if (item.kind === 'batch' && item.batch.unread) {
    const { count, reason } = item.batch.unread;
    lies.tell('unreadable', () => `blocks stored that cannot be read: ${plain(reason)}`, count);
  }
}

/** The line says already what it is of. */
const plain = (reason: string): string => reason.replace(/^kv events: /, '').replace('; does', ': does');

export class Readability {
  #wasRead = false;
  #wasUnread = false;

  /** Something came that could not be read, and blocks stored that could be never did. */
  get isUnread(): boolean {
    return this.#wasUnread && !this.#wasRead;
  }

  came(item: Item): void {
    if (item.kind === 'restarted') this.reset();
    if (this.#wasRead) return;
    if (item.kind === 'batch') {
      this.#wasRead = hasStores(item.batch);
      if (item.batch.unread) this.#wasUnread = true;
    } else if (item.kind === 'gap' && item.isUnread) this.#wasUnread = true;
  }

  reset(): void {
    this.#wasRead = false;
    this.#wasUnread = false;
  }
}

function hasStores(batch: PackedBatch): boolean {
  for (const { type } of eventsIn(batch)) if (type === recordType.stored || type === recordType.reused) return true;
  return false;
}
