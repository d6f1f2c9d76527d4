/** A suite that measured some of what it should: what came counts, what failed or was left out is told, and the run ends with 1. */
import { KvError } from '@kvtier/errors';
import type { Figure } from './figures.ts';

export class PartlyMeasured extends KvError {
  readonly figures: readonly Figure[];
  /** One line each. */
  readonly failed: readonly string[];

  constructor(suite: string, figures: readonly Figure[], failed: readonly string[]) {
    super('IO', `bench ${suite}: not all was measured: ${failed.join('; ')}`);
    this.figures = figures;
    this.failed = failed;
  }
}
