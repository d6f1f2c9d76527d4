/** Two and four workers that share answer 500 requests as one, whoever is killed. */
import { answerAsOne } from './cluster-as-one.ts';

answerAsOne(500, [
  { workers: 2, nodes: 2 },
  { workers: 4, nodes: 2 },
]);
