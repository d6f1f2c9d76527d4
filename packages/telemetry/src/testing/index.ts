export { hungCall } from './hung-call.ts';
