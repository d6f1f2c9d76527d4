export { LongestTurn, threadUse } from './longest-turn.ts';
export { dearPagesMs } from './new-page.ts';
