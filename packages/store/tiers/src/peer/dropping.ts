/**
 * How what a peer held is taken out of the directory when it is gone: nothing of it is read from then on, its entries go some in each turn,
 * and followers hear of those that nobody else holds.
 */
import type { Followers } from '../kit/followers.ts';
import type { Slices } from '../kit/slices.ts';
import { type PeerBits, type PeerDirectory, PeerSet } from './directory.ts';

export class Dropping {
  readonly #directory: PeerDirectory;
  readonly #followers: Followers;
  readonly #slices: Slices;
  /** Bits of peers that may hold something. */
  readonly #present = new PeerSet();
  /** Those that are being taken out of the directory. */
  readonly #drops = new Set<{ readonly bits: PeerBits; readonly gone: Promise<void> }>();

  constructor(directory: PeerDirectory, followers: Followers, slices: Slices) {
    this.#directory = directory;
    this.#followers = followers;
    this.#slices = slices;
  }

  /** Something of these peers is listed. */
  held(bits: PeerBits): void {
    this.#present.add(bits);
  }

  /** Nothing is read from these from now on; fulfilled when their entries are gone. */
  dropped(bits: PeerBits): Promise<void> {
    const isHeld = this.#present.has(bits);
    this.#present.remove(bits);
    if (!isHeld) return this.#gone(bits);
    if (this.#present.isEmpty) {
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
  async #gone({ word, mask }: PeerBits): Promise<void> {
    const drops = [...this.#drops].filter(({ bits }) => bits.word === word && (bits.mask & mask) !== 0);
    await Promise.all(drops.map(({ gone }) => gone));
  }
}
