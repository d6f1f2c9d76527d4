/**
 * Asks a publisher for the batches from a sequence number on. A socket of its own for every request, so that late answers
 * to an earlier one never mix in. Reads today's answers and those without a topic frame.
 */
import { setImmediate } from 'node:timers/promises';
import { KvError } from '@kvtier/errors';
import { Dealer } from 'zeromq';
import { decodeSeq, encodeSeq, endOfReplay, snapshotRequest } from './frames.ts';
import type { Replayed } from './replay-buffer.ts';
import { applyCurveClient, type CurveClient } from './security.ts';
import { uninterrupted } from './uninterrupted.ts';

export interface ReplayRequest {
  readonly endpoint: string;
  /** 'snapshot': all that the publisher holds, in place of batches. */
  readonly fromSeq: number | 'snapshot';
  /** Waited in all, for its parts. What is done with them takes as long as it takes. */
  readonly deadlineMs: number;
  /** For its first part: who says nothing for so long is not there. */
  readonly silenceMs: number;
  /** For each further one; default: as long. vLLM sends all at once and drops what finds no room, the end as well: no more will come. */
  readonly pauseMs?: number;
  readonly maxMessageBytes: number;
  readonly curve: CurveClient | null;
  readonly signal: AbortSignal;
}

/** Of reading what has arrived, in one turn of the event loop. */
const longestTurnMs = 10;

/** Until the publisher says that this was all; parts may be missing. Throws KvError DEADLINE, also when aborted, and PROTOCOL. */
export async function* requestReplay(request: ReplayRequest): AsyncGenerator<Replayed> {
  const { endpoint, fromSeq, deadlineMs, silenceMs, pauseMs = silenceMs, signal } = request;
  let leftMs = deadlineMs;
  // What is told of a snapshot counts when all of it is there: one without an end must not keep everybody waiting.
  const endMs = fromSeq === 'snapshot' ? performance.now() + deadlineMs : Number.POSITIVE_INFINITY;
  let mostMs = silenceMs;
  const socket = new Dealer({ linger: 0, maxMessageSize: request.maxMessageBytes });
  const abort = (): void => socket.close();
  signal.addEventListener('abort', abort);
  try {
    applyCurveClient(socket, request.curve);
    await uninterrupted(async () => socket.connect(endpoint));
    await socket.send(['', fromSeq === 'snapshot' ? snapshotRequest : encodeSeq(fromSeq)]);
    let turnMs = performance.now();
    while (true) {
      // What has arrived is read without a turn of the event loop between, thousands of batches in one.
      if (performance.now() - turnMs >= longestTurnMs) {
        await setImmediate();
        turnMs = performance.now();
      }
      const sinceMs = performance.now();
      const frames = await receive(socket, Math.min(mostMs, leftMs, endMs - sinceMs), signal, endpoint);
      leftMs -= performance.now() - sinceMs;
      mostMs = pauseMs;
      const [topic, seqFrame, payload] = frames.length === 3 ? [undefined, frames[1], frames[2]] : frames.slice(1);
      if (seqFrame?.equals(endOfReplay)) return;
      const seq = decodeSeq(seqFrame);
      if (seq === undefined || payload === undefined)
        throw new KvError('PROTOCOL', `${endpoint}: not an answer to a replay; is this the replay endpoint?`);
      yield { seq, topic: topic?.toString(), payload };
    }
  } finally {
    signal.removeEventListener('abort', abort);
    if (!socket.closed) socket.close();
  }
}

async function receive(socket: Dealer, leftMs: number, signal: AbortSignal, endpoint: string): Promise<Buffer[]> {
  const late = (): KvError =>
    new KvError('DEADLINE', `${endpoint}: no end of the replay in time; is the publisher overloaded?`);
  if (leftMs <= 0 || signal.aborted) throw late();
  socket.receiveTimeout = Math.ceil(leftMs);
  try {
    return await socket.receive();
  } catch {
    throw late();
  }
}
