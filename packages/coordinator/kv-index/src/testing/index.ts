/** For tests of other rooms, and for `npm run sim`. */
export { type FeedSimulationOptions, type FeedSimulationResult, simulateFeed } from './feed-simulation.ts';
