/** The tiers below the arena, as the configuration asks for them, fastest first. */
import { KvError } from '@kvtier/errors';
import type { ArenaHandle } from '@kvtier/native';
import type { Clock, Log } from '@kvtier/store';
import type { Tier } from '@kvtier/tiers';

export interface DiskOptions {
  readonly bytes: number;
  readonly ioBackend: 'auto' | 'io_uring' | 'threads';
  readonly segmentBytes?: number | undefined;
}

/** KvError when a tier cannot work from the start: no permission, no room, a cap that is too small. */
export async function openLower(
  disk: DiskOptions | null,
  _dataDir: string,
  _arena: ArenaHandle,
  _clock: Clock,
  _log: Log,
): Promise<Tier[]> {
  if (disk === null) return [];
  throw new KvError('SETUP', 'disk: this build has no disk tier; set disk to null');
}
