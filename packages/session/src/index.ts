export { defaultSessionLimits, type SessionLimits } from './limits.ts';
export { SessionServer, type SessionServerOptions } from './server.ts';
