/** The arena passes the one suite. It hands out the slots that it is tested with. */
import { tierConformance } from '../kit/testing/conformance.ts';

tierConformance('arena', async (bench) => bench.tier, { persistent: false, keepsMisfits: true });
