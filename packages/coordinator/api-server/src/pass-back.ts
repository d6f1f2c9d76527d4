/**
 * An answer of a worker with OpenAI's API on its way back to the client: as it is, piece by piece.
 *
 * A failure before its first byte is thrown. After that a stream of events ends with one that says the failure, where it stands between two,
 * and any other answer with its connection.
 *
 * Invariant: one piece of an answer waits at most, of a client that does not read; one that reads nothing for `unreadMs` is cut off.
 */
import { pipeline } from 'node:stream/promises';
import { KvError } from '@kvtier/errors';
import type { Usage } from '@kvtier/registry';
import type { FastifyReply } from 'fastify';
import { AnswerEnd, isOfEvents } from './answer-end.ts';
import { markCut } from './cut-answers.ts';
import type { Forwarded } from './engines.ts';
import type { Placed } from './placed.ts';
import { ofStreams } from './sse.ts';

/** Of the worker's headers, those of its answer and not of its connection. */
const told = ['content-type', 'cache-control', 'retry-after'] as const;

export interface PassBackOptions {
  readonly placed: Placed;
  readonly unreadMs: number;
  readonly signal: AbortSignal;
  /** Its head is about to be written. */
  readonly begun: () => void;
  /** Its first token is there, of one that is not streamed all of it. */
  readonly firstToken: (isStreamed: boolean) => void;
  /** Between two pieces of an answer that is streamed. */
  readonly pause: (elapsedMs: number) => void;
  /** What a whole answer says of its tokens, where it does. */
  readonly usage: (usage: Usage) => void;
}

/** @throws KvError: the reason of `signal`, or how the answer ended; nothing is written where `reply` says so */
export async function passBack(
  reply: FastifyReply,
  answer: Forwarded,
  { placed, unreadMs, signal, begun, firstToken, pause, usage }: PassBackOptions,
): Promise<void> {
  // The status is written with the first byte: until then the worker may still fail, and another one may not.
  const pieces = answer.body[Symbol.asyncIterator]();
  const first = await pieces.next();
  if (signal.aborted) {
    await pieces.return?.();
    throw signal.reason; // an answer that has closed says so no more
  }
  const isStreamed = answer.status === 200 && isOfEvents(answer);
  if (answer.status === 200 && !answer.start?.isRefused) firstToken(isStreamed);
  const headers: Record<string, string | string[]> = {
    ...placed.headers(),
    ...(isStreamed && ofStreams),
    'x-request-id': String(reply.request.id),
  };
  for (const name of told) {
    const value = answer.headers[name];
    if (value !== undefined) headers[name] = value;
  }
  begun();
  const { raw } = reply;
  try {
    raw.writeHead(answer.status, headers);
  } catch (error) {
    await pieces.return?.();
    throw error; // a head that HTTP does not allow: whoever called can still say so
  }
  reply.hijack();
  raw.on('timeout', () => raw.destroy());
  // Behind other answers on its connection: from when it is its turn.
  if (raw.socket === null) raw.setTimeout(unreadMs);
  // The client's time runs while it has something to read; how long a worker may be silent its line says.
  const mayWait = (ms: number): void => void raw.socket?.setTimeout(ms);
  const end = new AnswerEnd(answer, usage);
  let failure: KvError | undefined;
  const all = async function* () {
    try {
      let cameMs = performance.now();
      for (let next = first; !next.done; next = await pieces.next()) {
        end.push(next.value);
        const nowMs = performance.now();
        // What ends a stream brings no token.
        if (isStreamed && next !== first && !end.isDone()) pause(nowMs - cameMs);
        cameMs = nowMs;
        mayWait(unreadMs);
        yield next.value;
        mayWait(0);
      }
      if (!end.cameWhole()) markCut(raw);
    } catch (error) {
      const why = KvError.from(error, 'DISCONNECTED');
      if (why.code === 'CANCELLED') throw why; // its client left
      if (end.isDone()) return void end.cameWhole();
      failure = why;
      markCut(raw);
      const last = end.lastEvent(why);
      if (last === undefined) throw why;
      mayWait(unreadMs);
      yield last;
    } finally {
      await pieces.return?.();
    }
  };
  try {
    // What aborts `signal` ends the pieces, and so is told as any other failure.
    await pipeline(all, raw);
  } catch (error) {
    raw.destroy();
    throw signal.aborted ? signal.reason : KvError.from(error, 'DISCONNECTED');
  }
  if (failure) throw failure;
}
