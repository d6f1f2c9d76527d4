/** For tests: what policies walk over. */
export { EntryLists } from '../entry-lists.ts';
