/** What travels between processes: the messages generated from proto/, and the frames of the session link. gRPC: `@kvtier/wire/grpc`. */

export { HeldBlocks, type NodePulse } from '@kvtier/data-plane/held-table';
export { fromFailure } from './failure.ts';
export { FrameReader, writeFrame } from './frame.ts';
export { KvFailure } from './generated/kvtier/v1/errors.ts';
export {
  Abort,
  Attach,
  Attached,
  ClientFrame,
  Commit,
  Done,
  EndPin,
  Hold,
  Load,
  LoadDone,
  Lookup,
  LookupResult,
  Pin,
  Ready,
  Release,
  Reserve,
  Reserved,
  ReserveStatus,
  ServerFrame,
  StatsRequest,
  StatsResult,
  TierSpan,
  TierStats,
  Unpin,
} from './generated/kvtier/v1/session.ts';
export { holdArena } from './hold.ts';
export { checkServer, checkSocketFolder, descriptorOf } from './private-socket.ts';
/** The version that `Attach.protocol` carries. */
export const sessionProtocol = 1;
/** Hashes that one frame of the session link may carry: what is held beyond them is not asked for. */
export const maxHashesPerFrame = 65_536;
