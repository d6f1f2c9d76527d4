export * from './executor.ts';
