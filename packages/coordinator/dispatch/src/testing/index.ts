/** For tests: doubles of what the choice asks. */
export { FakeHoldings, type FakeWorker, FakeWorkers, factsOf, recordOf } from './fake-workers.ts';
