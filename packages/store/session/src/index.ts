export type { SessionLimits } from './limits.ts';
export type { SessionServerOptions } from './options.ts';
export { SessionServer } from './server.ts';
export { checkSocketPath } from './socket.ts';
