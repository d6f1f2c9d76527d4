/** Workers and nodes that are followed, and what is known of each. */
import type { NodeRecord, WorkerRecord } from '@kvtier/config';
import type { EngineListing } from './engine-listing.ts';
import type { FollowedStream, Problem } from './followed-stream.ts';
import type { History } from './history.ts';
import type { NodeListing } from './node-listing.ts';
import type { WorkerView } from './views.ts';

/** A worker of this model, and what is known of it. */
export interface FollowedWorker {
  /** As routing numbers workers. */
  readonly number: number;
  readonly record: WorkerRecord;
  /** Its record's `node`, where discovery knows it. */
  readonly node: NodeRecord | undefined;
  /** Blocks of its pool; 0 or undefined: not known. */
  readonly totalBlocks?: number;
  /** Another one than before: it holds nothing of what it said. */
  readonly bootEpoch?: string;
  /** First 16 hex digits of the namespace of each of its attention groups: the node tells blocks of all models. Undefined: not known. */
  readonly namespaces?: readonly string[];
  /** Why nobody reads its events, whether it has any or not; undefined: they are read. */
  readonly unread?: Problem | undefined;
}

export interface NodeEntry {
  readonly record: NodeRecord;
  readonly listing: NodeListing | undefined;
  readonly stream: FollowedStream | undefined;
  readonly teller: { resync(): void };
  why: Problem | undefined;
  isWarned: boolean;
}

export interface WorkerEntry {
  followed: FollowedWorker;
  readonly listing: EngineListing | undefined;
  readonly stream: FollowedStream | undefined;
  node: NodeEntry | undefined;
  history: History | undefined;
  why: Problem | undefined;
  /** Of `why`. */
  isWarned: boolean;
  /** Requests with new blocks since its last event, and since when (Unix time in seconds). */
  owed: number;
  owedSinceS: number;
  view: WorkerView;
}
