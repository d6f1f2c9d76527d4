export { hungCall } from './hung-call.ts';
export { TurnWatch } from './turn-watch.ts';
