/** Two and four workers that share answer 500 requests as one, whoever is killed. */
import { answerAsOne } from './cluster-as-one.ts';

// Of each kind one, and more.
answerAsOne(
  500,
  [
    { workers: 2, nodes: 2 },
    { workers: 4, nodes: 2 },
  ],
  { killed: 4, shared: 1 },
);
