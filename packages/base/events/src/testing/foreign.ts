/** Batches as publishers of others write them, whatever stands in their events. */
import { Packr } from 'msgpackr';

const packr = new Packr({ useRecords: false, variableMapSize: true });

export const foreignBatch = (events: readonly unknown[], rank: number | null = 0): Buffer =>
  packr.pack([1.5, events, rank]);
