/**
 * Requests to workers with OpenAI's API: the body goes on as it came, and the answer comes back as it is (pass-back.ts).
 *
 * Until its first byte, of a stream its first token, a failure is tried at another worker: a connection that ends, and statuses that say "not
 * here, not now", which a stream may say in its first event. When all that were asked have answered 500, the last one's words are the answer.
 *
 * Invariants: what a client's `kv_transfer_params` lend (transfer.ts) is shown to one worker: the next one computes the prompt. Once an
 * answer goes back nobody else is asked, and the body is let go.
 */
import { type Choice, Saturated, sessionHeaders } from '@kvtier/dispatch';
import type { Usage } from '@kvtier/registry';
import type { Logger } from '@kvtier/telemetry';
import type { FastifyReply, FastifyRequest } from 'fastify';
import type { ToPass } from './body-reader.ts';
import type { Forwarded } from './engines.ts';
import { HttpError } from './errors.ts';
import { withMembers } from './json-members.ts';
import { passBack } from './pass-back.ts';
import type { Placed } from './placed.ts';
import type { Workplace } from './plan.ts';
import { PodRefusal, refusalOf } from './pod-refusal.ts';
import { Tries } from './tries.ts';
import { TwoLegs } from './two-legs.ts';

/** Another worker may do better. */
const notHere: ReadonlySet<number> = new Set([429, 500, 502, 503, 504]);
/** Of the client's headers, those that say something to the worker. Its name for the request it has where it is good for all. */
const kept = ['accept', 'prefer', 'traceparent', 'tracestate', ...sessionHeaders] as const;
/** As llm-d's endpoint picker names the prefill pod to the decode pod's sidecar. */
const prefillerHeader = 'x-prefiller-host-port';

export interface ForwardOptions {
  readonly place: Workplace;
  readonly path: string;
  readonly requestId: string;
  readonly body: ToPass;
  readonly placed: Placed;
  /** performance.now(); and until its first token: it is refused when that would come later. undefined: never. */
  readonly arrivedMs: number;
  readonly ttftMs: number | undefined;
  readonly unreadMs: number;
  readonly signal: AbortSignal;
  /** An answer goes back: no other worker is asked. */
  readonly begun: () => void;
  /** A worker failed so, and another try begins. */
  readonly retried: (error: unknown) => void;
  /** Of an answer that is streamed. */
  readonly firstToken: () => void;
  /** Between two pieces of an answer that is streamed. */
  readonly pause: (elapsedMs: number) => void;
  /** What a whole answer says of its tokens, where it does. */
  readonly usage: (usage: Usage) => void;
  readonly logger: Logger;
}

/** Answers the request. @throws KvError: while nothing is written */
export async function forward(request: FastifyRequest, reply: FastifyReply, options: ForwardOptions): Promise<void> {
  const tries = new Tries(options.place);
  try {
    await tryAll(request, reply, options, tries);
  } catch (error) {
    if (!(error instanceof PodRefusal) || !tries.mayBeRequest || reply.raw.headersSent) throw error;
    const { placed, logger } = options;
    const { by, said, words } = error;
    placed.answered(by);
    const { name } = by.worker.record;
    const why = words === '' ? `${error.message}, or look into its log.` : `worker ${name}: answers 500: ${words}`;
    if (said === undefined) {
      void reply.headers(placed.headers());
      throw new HttpError(500, why, { code: 'engine_failed' });
    }
    logger.warn({ request: request.id }, why);
    await passBack(reply, said, { ...options, firstToken: () => {} });
  }
}

async function tryAll(
  request: FastifyRequest,
  reply: FastifyReply,
  options: ForwardOptions,
  tries: Tries,
): Promise<void> {
  const { place, body, placed, signal, requestId, arrivedMs, ttftMs } = options;
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
    let bytes = legsNow ? await legsNow.before(choice, admit) : body.held.bytes;
    // Such a body is never split: it is as it came.
    if (isLent) bytes = withMembers(bytes, body.members!, { kv_transfer_params: undefined });
    isLent = body.isLoan;
    return place.engines.forward(choice.worker.number, options.path, headers, bytes, signal);
  };
  /** How the worker before failed; and that, if it answered so. */
  let failed: unknown;
  let refused: PodRefusal | undefined;
  for (;;) {
    const choice = await tries.next(routed, signal).catch((error: unknown) => {
      // When all will have room dispatch knows better than a pod that failed before.
      throw signal.aborted || error instanceof Saturated ? error : (refused ?? error);
    });
    if (failed !== undefined) options.retried(failed);
    let answerTokens: number | undefined;
    try {
      placed.chosen(choice);
      if (isOnlyIfHeld) checkHeld(reply, body, choice, placed);
      let answer = await ask(choice);
      const split = legsFor(choice);
      if (split && answer.status === 200) answer = (await split.after(answer, choice)) ?? (await ask(choice));
      if (notHere.has(answer.status)) throw await refusalOf(choice, answer);
      const usage = (told: Usage): void => {
        answerTokens = told.completionTokens;
        options.usage(told);
      };
      const firstToken = (isStreamed: boolean): void => {
        choice.firstToken(isStreamed);
        // The first byte of a whole answer comes with its last token.
        if (!isStreamed) return;
        if (sent) {
          const { model } = wanted;
          const seenS = (performance.now() - sent.atMs) / 1_000;
          inTime.came(sent.predictedS, seenS, { model, worker: sent.worker });
        }
        options.firstToken();
      };
      await passBack(reply, answer, { ...options, usage, firstToken });
      return;
    } catch (error) {
      if (reply.raw.headersSent) throw error;
      placed.retried(choice);
      tries.failed(error, choice, signal);
      if (isLent && body.members === undefined) throw error; // they cannot be taken out of it
      failed = error;
      refused = error instanceof PodRefusal ? error : undefined;
    } finally {
      choice.ended(answerTokens);
    }
  }
}

/** It asks for events. Of a body with more parameters than anybody sends nobody knows. */
function isStreamed({ members, held }: ToPass): boolean {
  const at = members?.names.lastIndexOf('stream') ?? -1;
  if (members === undefined || at < 0) return false;
  const [from, end] = members.spans.subarray(2 * at);
  return /:\s*true\s*$/.test(Buffer.from(held.bytes.subarray(from, end)).toString('latin1'));
}

/** RFC 7240, without its parameters. */
function prefers({ headers }: FastifyRequest, preference: string): boolean {
  const given = headers.prefer;
  const all = typeof given === 'string' ? given.split(',', 16) : (given ?? []);
  return all.some((one) => one.split(';', 1)[0]!.trim().toLowerCase() === preference);
}

/** Whether nobody here can say what is held of the prompt: without an index, and of an adapter. */
const isUnknown = ({ otherName }: ToPass, { match }: Choice): boolean =>
  match.isUnknown === true || otherName?.isAdapter === true;

/** @throws HttpError 412: full blocks of the prompt would have to be computed, more than `cache_hit_threshold` leaves */
function checkHeld(reply: FastifyReply, body: ToPass, choice: Choice, placed: Placed): void {
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
