/**
 * The OpenAI-compatible API server: HTTP before all workers (`http-server.ts`; who is answered: `callers.ts`). A request's way: its body
 * (`bodies.ts`, `body-reader.ts`), understood in a thread (`text-pool.ts`, `text-queue.ts`) or at once (`ids-at-once.ts`, `json-ids.ts`);
 * what it asks for (`plan.ts`, `expected.ts`); one worker after the other (`tries.ts`, `generation.ts`), pods with two legs
 * (`two-legs.ts`; what a pod lends: `transfer.ts`; what two pods cannot share: `unsplit.ts`) or as it is (`forwarding.ts`); its answers
 * (`answers.ts`, `answer.ts`, `written-answers.ts`).
 */

export { ApiKeys } from './api-keys.ts';
export { type ApiServer, type ApiServerOptions, makeApiServer } from './api-server.ts';
export type { PromptFacts } from './prompt-reader.ts';
export { loadTokenizer } from './tokenizer.ts';
