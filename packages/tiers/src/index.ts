export type * from './tier.ts';
