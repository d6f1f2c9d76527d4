export { serviceHelp } from '../service-arguments.ts';
export { SourceLines } from '../source-lines.ts';
export { hungCall } from './hung-call.ts';
export { TurnWatch } from './turn-watch.ts';
