/**
 * How what a peer held is taken out of the directory when it is gone: nothing of it is read from then on, its entries go some in each turn,
 * and followers hear of those that nobody else holds.
 */
import type { Followers } from '../kit/followers.ts';
import type { Slices } from '../kit/slices.ts';
import type { PeerDirectory } from './directory.ts';

export class Dropping {
  readonly #directory: PeerDirectory;
  readonly #followers: Followers;
  readonly #slices: Slices;
  /** Bits of peers that may hold something. */
  #present = 0;
  /** Those that are being taken out of the directory. */
  readonly #drops = new Set<{ readonly bits: number; readonly gone: Promise<void> }>();

  constructor(directory: PeerDirectory, followers: Followers, slices: Slices) {
    this.#directory = directory;
    this.#followers = followers;
    this.#slices = slices;
  }

  /** Something of these peers is listed. */
  held(bits: number): void {
    this.#present |= bits;
  }

  /** Nothing is read from these from now on; fulfilled when their entries are gone. */
  dropped(bits: number): Promise<void> {
    const others = this.#present & ~bits;
    const isHeld = (this.#present & bits) !== 0;
    this.#present = others;
    if (!isHeld) return this.#gone(bits);
    if (others === 0) {
      this.#directory.dropAll();
      this.#followers.cleared();
      return Promise.resolve();
    }
    const next = this.#directory.drop(bits);
    const drop = {
      bits,
      gone: new Promise<void>((resolve) => {
        this.#slices.add(() => {
          const gone = next();
          for (const [namespace, hashes] of gone ?? []) this.#followers.removed(namespace, hashes);
          if (gone !== undefined) return true;
          this.#drops.delete(drop);
          resolve();
          return false;
        });
      }),
    };
    this.#drops.add(drop);
    return this.#gone(bits);
  }

  /** What was dropped before may still be going. */
  async #gone(bits: number): Promise<void> {
    await Promise.all([...this.#drops].filter((drop) => (drop.bits & bits) !== 0).map(({ gone }) => gone));
  }
}
