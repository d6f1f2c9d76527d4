/** Verdicts of tests on the laws of the product: what breaks one, however rarely, is a defect that no second attempt forgives. */

/** The set-up of tests (test/setup/properties.ts) knows it by its name, along the causes of whatever was thrown. */
export class LawBroken extends Error {
  override readonly name = 'LawBroken';

  /** `law`: its number in ARCHITECTURE.md. */
  constructor(law: number, what: string, options?: ErrorOptions) {
    super(`law ${law}: ${what}`, options);
  }
}

/** @throws LawBroken when `check` throws */
export function byLaw(law: number, check: () => void): void {
  try {
    check();
  } catch (error) {
    throw new LawBroken(law, (error as Error).message, { cause: error });
  }
}
