/**
 * Four workers that share answer as one, whoever is killed; 500 requests of two and of four: cluster.long.test.ts. Whether a node has a block
 * from the other is left to chance in so few: who holds a prompt is asked for it.
 */
import { answerAsOne } from './cluster-as-one.ts';

answerAsOne(60, [{ workers: 4, nodes: 2 }], { killed: 1, shared: 0 });
