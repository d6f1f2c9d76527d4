/** Each process of a cluster in turn is killed and stopped under load: cluster-deaths.ts; prefill and decode apart. */
import { describeDeaths } from './cluster-deaths.ts';

describeDeaths({
  what: 'prefill and decode workers',
  size: { workers: 3, prefill: 1, nodes: 3, coordinators: 2, handoff: { split: 'always' } },
  who: /^worker-[01]$/,
});
