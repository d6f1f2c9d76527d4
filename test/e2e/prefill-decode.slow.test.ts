/** Two prefill and two decode workers answer as one, whoever is killed; 500 requests, of one and one, too: prefill-decode.long.test.ts. */
import { answerAsOne } from './apart-as-one.ts';

answerAsOne(90, [2]);
