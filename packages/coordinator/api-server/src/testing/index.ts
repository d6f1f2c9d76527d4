/** For tests: doubles, rigs and what else of this room they look at. */
export { event, greedy, ScriptedEngine, say } from './scripted-engine.ts';
export { type WorstTurns, watchTurns } from './turns.ts';
