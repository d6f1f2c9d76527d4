/** Every bound of the session link, in one place. */
import { maxHashesPerFrame } from '@kvtier/wire';

export interface SessionLimits {
  /** Connections, attached or not, and quarantined sessions together. */
  readonly maxSessions: number;
  /** Hashes in one request: a million tokens at 16 per block. What is done to so many goes on over several turns. */
  readonly maxHashes: number;
  /** Time from connecting to Attach. */
  readonly attachDeadlineMs: number;
  /** Time for a refused peer to read why. */
  readonly goodbyeMs: number;
  /** Requests of one session that are answered before others get a turn: 64 KiB hold thousands of small ones. */
  readonly framesPerTurn: number;
  /** What all sessions together are answered for in a turn, as far as one request more goes. */
  readonly turnMs: number;
  /** Unread answers beyond which a session's requests are not read, until it has caught up. */
  readonly pauseBytes: number;
  /** Unread answers beyond which a session is disconnected. */
  readonly maxPendingBytes: number;
  /** Blocks in one Ready. */
  readonly readyBlocks: number;
  /** How often the processes behind quarantined slots are looked at. */
  readonly quarantinePollMs: number;
}

export const defaultSessionLimits: SessionLimits = {
  maxSessions: 256,
  maxHashes: maxHashesPerFrame,
  attachDeadlineMs: 10_000,
  goodbyeMs: 1_000,
  framesPerTurn: 64,
  turnMs: 10,
  pauseBytes: 1 << 20,
  maxPendingBytes: 32 << 20,
  readyBlocks: 4096,
  quarantinePollMs: 200,
};
