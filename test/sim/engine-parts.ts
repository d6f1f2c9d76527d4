/** What an engine of a world is part of, and what it shares with the others. */
import type { Ticket } from '@kvtier/placement';
import type { Space } from './contents.ts';
import type { SimNode } from './node.ts';

export interface EngineParts {
  readonly node: SimNode;
  readonly space: Space;
  readonly tenant: string;
  readonly ttlS: number;
  /** Names that somebody has committed, ever: nothing else may be held. */
  readonly committed: Set<string>;
  /** Until when each of them may be used, in virtual ms: the latest end that any commit gave it. */
  readonly ends: Map<string, number>;
  /** Of pins, shown by whom ever: the latest of all engines. */
  readonly tickets: Ticket[];
  readonly report: (error: unknown) => void;
  /** It died; another will come. */
  readonly onDied: (node: SimNode) => void;
  readonly tally: (what: string, count?: number) => void;
}
