/**
 * Requests to workers with OpenAI's API: the body goes on as it came, and the answer comes back as it is, piece by piece.
 *
 * Until its first byte a failure is tried at another worker: a connection that ends, and statuses that say "not here, not now". After
 * that a stream of events ends with one that says the failure, where it stands between two, and any other answer with its connection.
 *
 * Invariants: one piece of an answer waits at most, of a client that does not read; one that reads nothing for `unreadMs` is cut off. What
 * a client's `kv_transfer_params` lend (transfer.ts) is shown to one worker: the next one computes the prompt.
 */
import { pipeline } from 'node:stream/promises';
import { type Choice, Saturated, sessionHeaders } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { leave, type Usage } from '@kvtier/registry';
import type { FastifyReply, FastifyRequest } from 'fastify';
import { AnswerEnd, isOfEvents } from './answer-end.ts';
import { markCut } from './cut-answers.ts';
import type { Forwarded } from './engines.ts';
import { HttpError } from './errors.ts';
import { withMembers } from './json-members.ts';
import type { PassedOn } from './pass-on.ts';
import type { Placed } from './placed.ts';
import type { Workplace } from './plan.ts';
import { PodRefusal } from './pod-refusal.ts';
import { Tries } from './tries.ts';
import { TwoLegs } from './two-legs.ts';

/** Another worker may do better. */
const notHere: ReadonlySet<number> = new Set([429, 500, 502, 503, 504]);
/** Of the client's headers, those that say something to the worker. */
const kept = ['accept', 'prefer', 'x-request-id', 'traceparent', 'tracestate', ...sessionHeaders] as const;
/** Of the worker's headers, those of its answer and not of its connection. */
const told = ['content-type', 'cache-control', 'retry-after'] as const;
/** As llm-d's endpoint picker names the prefill pod to the decode pod's sidecar. */
const prefillerHeader = 'x-prefiller-host-port';

export interface ForwardOptions {
  readonly place: Workplace;
  readonly path: string;
  readonly requestId: string;
  readonly body: PassedOn;
  readonly placed: Placed;
  /** performance.now(); and until its first token: it is refused when that would come later. undefined: never. */
  readonly arrivedMs: number;
  readonly ttftMs: number | undefined;
  readonly unreadMs: number;
  readonly signal: AbortSignal;
  /** A worker failed; it is tried at another. */
  readonly retried: (error: unknown) => void;
  /** Of an answer that is streamed. */
  readonly firstToken: () => void;
  /** Between two pieces of an answer that is streamed. */
  readonly pause: (elapsedMs: number) => void;
  /** What a whole answer says of its tokens, where it does. */
  readonly usage: (usage: Usage) => void;
}

/** Answers the request. @throws KvError: while nothing is written */
export async function forward(request: FastifyRequest, reply: FastifyReply, options: ForwardOptions): Promise<void> {
  const { place, body, placed, signal, requestId, arrivedMs, ttftMs } = options;
  const tries = new Tries(place);
  const headers: Record<string, string> = { 'content-type': 'application/json', 'x-request-id': String(request.id) };
  for (const name of kept) {
    const value = request.headers[name];
    if (typeof value === 'string') headers[name] = value;
  }
  const { model, otherName, tokens, blockTokens, maxTokens, keys, session } = body;
  const firstTokenByMs = ttftMs === undefined ? undefined : arrivedMs + ttftMs;
  const prompt = { tokens, blockTokens, maxTokens, keys, session, firstTokenByMs };
  const among = place.among(otherName?.name ?? model);
  const routed = { id: requestId, model, among, isStreamed: isStreamed(body), ...prompt };
  const { pods, inTime } = place;
  const named = request.headers[prefillerHeader];
  const legs = pods.concerns(model)
    ? new TwoLegs({
        ...{ pods, routed, path: options.path, headers, body, placed, signal },
        named: typeof named === 'string' && named !== '' ? named : undefined,
      })
    : undefined;
  const isOnlyIfHeld = prefers(request, 'if-available');
  // Nobody computes what may have to be refused: the pod alone can say whether it has it.
  const legsFor = (choice: Choice): TwoLegs | undefined => (isOnlyIfHeld && isUnknown(body, choice) ? undefined : legs);
  const wanted = { model, arrivedMs, ttftMs };
  /** Of the request at its last worker: when it was sent, and how long it was to take. */
  let sent: { readonly worker: string; readonly atMs: number; readonly predictedS: number } | undefined;
  let isLent = false;
  const ask = async (choice: Choice): Promise<Forwarded> => {
    const admit = (predictedS: number): void => {
      const worker = choice.worker.record.name;
      inTime.admit(wanted, worker, predictedS);
      sent = { worker, atMs: performance.now(), predictedS };
    };
    const legsNow = legsFor(choice);
    if (!legsNow) admit(choice.firstTokenS);
    let bytes = legsNow ? await legsNow.before(choice, admit) : new Uint8Array(body.passedOn);
    // Such a body is never split: it is as it came.
    if (isLent) bytes = withMembers(bytes, body.members!, { kv_transfer_params: undefined });
    isLent = body.isLoan;
    return place.engines.forward(choice.worker.number, options.path, headers, bytes, signal);
  };
  let refused: PodRefusal | undefined;
  for (;;) {
    const choice = await tries.next(routed, signal).catch((error: unknown) => {
      // When all will have room dispatch knows better than a pod that failed before.
      throw error instanceof Saturated ? error : (refused ?? error);
    });
    let answerTokens: number | undefined;
    try {
      placed.chosen(choice);
      if (isOnlyIfHeld) checkHeld(reply, body, choice, placed);
      let answer = await ask(choice);
      const split = legsFor(choice);
      if (split && answer.status === 200) answer = (await split.after(answer, choice)) ?? (await ask(choice));
      if (notHere.has(answer.status)) {
        refused = new PodRefusal(choice.worker.record.name, answer.status, answer.headers['retry-after']);
        await leave(answer);
        throw refused;
      }
      const usage = (told: Usage): void => {
        answerTokens = told.completionTokens;
        options.usage(told);
      };
      const firstToken = (): void => {
        if (sent) {
          const { model } = wanted;
          const seenS = (performance.now() - sent.atMs) / 1_000;
          inTime.came(sent.predictedS, seenS, { model, worker: sent.worker });
        }
        options.firstToken();
      };
      await stream(reply, answer, choice, { ...options, usage, firstToken });
      return;
    } catch (error) {
      if (reply.raw.headersSent) throw error;
      placed.retried(choice);
      tries.failed(error, choice, signal);
      if (isLent && body.members === undefined) throw error; // they cannot be taken out of it
      options.retried(error);
    } finally {
      choice.ended(answerTokens);
    }
  }
}

/** It asks for events. Of a body with more parameters than anybody sends nobody knows. */
function isStreamed({ members, passedOn }: PassedOn): boolean {
  const at = members?.names.lastIndexOf('stream') ?? -1;
  if (members === undefined || at < 0) return false;
  const [from, end] = members.spans.subarray(2 * at);
  return /:\s*true\s*$/.test(Buffer.from(passedOn, from, end! - from!).toString('latin1'));
}

/** RFC 7240, without its parameters. */
function prefers({ headers }: FastifyRequest, preference: string): boolean {
  const given = headers.prefer;
  const all = typeof given === 'string' ? given.split(',', 16) : (given ?? []);
  return all.some((one) => one.split(';', 1)[0]!.trim().toLowerCase() === preference);
}

/** Whether nobody here can say what is held of the prompt: without an index, and of an adapter. */
const isUnknown = ({ otherName }: PassedOn, { match }: Choice): boolean =>
  match.isUnknown === true || otherName?.isAdapter === true;

/** @throws HttpError 412: full blocks of the prompt would have to be computed, more than `cache_hit_threshold` leaves */
function checkHeld(reply: FastifyReply, body: PassedOn, choice: Choice, placed: Placed): void {
  const { tokens, blockTokens, cacheHitThreshold = 1 } = body;
  const { blocks, remoteBlocks = 0 } = choice.match;
  if (isUnknown(body, choice)) return; // the pod may know
  // The last token is computed in any case.
  const wanted = Math.ceil(Math.floor(Math.max(tokens - 1, 0) / blockTokens) * cacheHitThreshold);
  if (blocks + remoteBlocks >= wanted) return;
  void reply.headers(placed.headers());
  throw new HttpError(
    412,
    `The prompt is not held: ${blocks + remoteBlocks} of the ${wanted} blocks that it takes; send it without "Prefer: if-available".`,
    { code: 'not_held' },
  );
}

async function stream(
  reply: FastifyReply,
  answer: Forwarded,
  choice: Choice,
  { placed, unreadMs, signal, firstToken, pause, usage }: ForwardOptions,
): Promise<void> {
  // The status is written with the first byte: until then the worker may still fail, and another one may not.
  const pieces = answer.body[Symbol.asyncIterator]();
  const first = await pieces.next();
  if (signal.aborted) {
    await pieces.return?.();
    throw signal.reason; // an answer that has closed says so no more
  }
  const isStreamed = answer.status === 200 && isOfEvents(answer);
  if (answer.status === 200) {
    choice.firstToken(isStreamed);
    // The first byte of a whole answer comes with its last token.
    if (isStreamed) firstToken();
  }
  const headers: Record<string, string | string[]> = { ...placed.headers(), 'x-request-id': String(reply.request.id) };
  for (const name of told) {
    const value = answer.headers[name];
    if (value !== undefined) headers[name] = value;
  }
  reply.hijack();
  const { raw } = reply;
  raw.on('timeout', () => raw.destroy());
  // Behind other answers on its connection: from when it is its turn.
  if (raw.socket === null) raw.setTimeout(unreadMs);
  raw.writeHead(answer.status, headers);
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
