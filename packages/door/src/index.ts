/** The OpenAI-compatible door: HTTP before one engine worker. */
export { Detokenizer } from './detokenizer.ts';
export { type Door, type DoorOptions, startDoor } from './door.ts';
export { StopMatcher } from './stop-matcher.ts';
export { loadTokenizer, Tokenizer } from './tokenizer.ts';
