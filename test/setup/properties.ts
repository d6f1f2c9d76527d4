/**
 * One seed for all properties of a run of a file: other cases every time, and the same ones at a second attempt, so that a rare
 * counterexample fails twice, as what merely ran out of time does not. A failure names its seed; KVTIER_SEED=n runs it again.
 */
import { randomInt } from 'node:crypto';
import fc from 'fast-check';

fc.configureGlobal({ ...fc.readConfigureGlobal(), seed: Number(process.env.KVTIER_SEED ?? randomInt(2 ** 31)) });
