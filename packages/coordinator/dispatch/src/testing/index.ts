/** For tests: doubles of what the choice asks. */
export { FakeHoldings, FakeWorkers, factsOf, recordOf } from './fake-workers.ts';
