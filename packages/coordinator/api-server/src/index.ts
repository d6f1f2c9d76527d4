/** The OpenAI-compatible API server: HTTP before all workers. */

export { ApiKeys } from './api-keys.ts';
export { type ApiServer, type ApiServerOptions, makeApiServer, startApiServer } from './api-server.ts';
export { Detokenizer } from './detokenizer.ts';
export { type PromptFacts, PromptReader } from './prompt-reader.ts';
export { StopMatcher } from './stop-matcher.ts';
export { loadTokenizer, Tokenizer } from './tokenizer.ts';
