/** Each process of a cluster in turn is killed and stopped under load: cluster-deaths.ts; prefill and decode apart: cluster-deaths.long.test.ts. */
import { describeDeaths } from './cluster-deaths.ts';

describeDeaths({ what: 'workers of both roles', size: { workers: 2, nodes: 2, coordinators: 2 }, who: /-0$/ });
