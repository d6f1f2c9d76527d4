/** For tests: doubles, rigs and what else of this room they look at. */
export { PodLoad } from '../pod-load.ts';
export { scrapeOf } from '../scrape.ts';
export { StepLine } from '../step-line.ts';
export { Pod, type PodFigures, type PodRequest } from './pod.ts';
export { SpokenDiscovery } from './rig.ts';
export { type Call, cacheUse, engineLoad, event, fail, greedy, ScriptedEngine, say } from './scripted-engine.ts';
export * from './scripted-hand-off.ts';
export { type PodStore, StorePod, wordsOf } from './store-pod.ts';
