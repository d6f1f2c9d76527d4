export {
  type Completion,
  type CompletionRequest,
  complete,
  metricValues,
  resetPrefixCache,
  waitUntil,
  waitUntilServing,
} from './client.ts';
export { DemoTable, demoKinds } from './demo-table.ts';
export { type Launched, launch } from './launch.ts';
export type { UpOptions } from './options.ts';
export { type Program, program, started } from './programs.ts';
export type { ServiceSpec } from './supervisor.ts';
export type { System, SystemEvents } from './system.ts';
export { waitForWriteDown } from './write-down.ts';
