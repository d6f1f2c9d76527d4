/** Four workers that share answer as one, whoever is killed; 500 requests of two and of four: cluster.long.test.ts. */
import { answerAsOne } from './cluster-as-one.ts';

answerAsOne(60, [{ workers: 4, nodes: 2 }], { killed: 1, shared: 1 });
