/** One prefill and one decode worker, and two and two, answer 500 requests as one, whoever is killed. */
import { answerAsOne } from './apart-as-one.ts';

answerAsOne(500, [1, 2]);
