/** Slots in the midst of which a device hangs: whatever their owners do with them, their memory is given to nobody until it has ended. */
import { invariant } from '@kvtier/errors';

export class HeldSlots {
  /** With the count of those who say so. */
  readonly #held = new Map<number, { count: number; isFreed: boolean }>();

  has(slot: number): boolean {
    return this.#held.has(slot);
  }

  hold(slot: number): void {
    const hold = this.#held.get(slot);
    if (hold === undefined) this.#held.set(slot, { count: 1, isFreed: false });
    else hold.count++;
  }

  /** Undefined while others hold it still; else whether it was freed meanwhile, and can be now. */
  release(slot: number): boolean | undefined {
    const hold = this.#held.get(slot);
    invariant(hold !== undefined, () => `arena: slot ${slot} is released and was not held`);
    if (--hold.count > 0) return undefined;
    this.#held.delete(slot);
    return hold.isFreed;
  }

  /** Its owner frees it. False: nobody holds it. */
  freed(slot: number): boolean {
    const hold = this.#held.get(slot);
    if (hold === undefined) return false;
    hold.isFreed = true;
    return true;
  }

  /** Those that their owners have freed. */
  get waiting(): number[] {
    return [...this.#held].filter(([, { isFreed }]) => isFreed).map(([slot]) => slot);
  }
}
