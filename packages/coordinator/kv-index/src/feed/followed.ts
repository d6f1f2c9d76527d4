/** Workers and nodes that are followed, and what is known of each. */
import { type EventSource, type NodeRecord, rankSources, type WorkerRecord } from '@kvtier/config';
import type { EngineListing } from './engine-listing.ts';
import type { EngineStreams } from './engine-streams.ts';
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
  /** Of a pod: data-parallel engines behind its address, as its metrics tell; undefined: one. */
  readonly engines?: number | undefined;
  /** Why nobody reads its events, whether it has any or not; undefined: they are read. */
  readonly unread?: Problem | undefined;
}

export interface NodeEntry {
  /** As discovery has it now. */
  record: NodeRecord;
  readonly listing: NodeListing | undefined;
  readonly stream: FollowedStream | undefined;
  readonly teller: { resync(): void };
  why: Problem | undefined;
  isWarned: boolean;
}

export interface WorkerEntry {
  followed: FollowedWorker;
  /** One for each of its streams. */
  readonly listings: readonly EngineListing[];
  readonly stream: EngineStreams | undefined;
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

/** Of how many engines each tells for itself: as its record says, else as its metrics do. */
export const ranksOf = ({ record, engines }: FollowedWorker): number =>
  record.kind === 'openai' ? (record.events?.ranks ?? engines ?? 1) : 1;

/** Where each of its engines publishes; none: nowhere, or nobody reads it. */
export function sourcesOf(followed: FollowedWorker): readonly EventSource[] {
  const { events } = followed.record;
  if (events === null || followed.unread !== undefined) return [];
  const { ranks: _, ...source } = events;
  return rankSources(source, ranksOf(followed)) ?? [source];
}
