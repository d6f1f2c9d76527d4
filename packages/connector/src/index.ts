export * from './connector.ts';
