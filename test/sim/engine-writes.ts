/** What an engine of a world stores: slots are reserved, written after a while, and committed, or given back. */
import { type HashKey, headerBytes } from '@kvtier/identity';
import type { Holdings, Reservation, Steps } from '@kvtier/placement';
import { contentOf, shortName } from './contents.ts';
import type { EngineParts } from './engine-parts.ts';
import type { VirtualSession } from './virtual-session.ts';
import { Violation } from './world.ts';

interface Reserved {
  readonly hash: HashKey;
  written: boolean;
}

export interface EngineWritesParts {
  readonly parts: EngineParts;
  readonly holdings: Holdings;
  readonly session: VirtualSession;
  /** It died, or is another one's by now: copies that are under way touch nothing. */
  readonly isDead: () => boolean;
  readonly later: (fromMs: number, toMs: number, what: string, fn: () => void) => void;
}

export class EngineWrites {
  /** By where they lie. */
  readonly slots = new Map<number, Reserved>();
  readonly #parts: EngineParts;
  readonly #holdings: Holdings;
  readonly #session: VirtualSession;
  readonly #isDead: EngineWritesParts['isDead'];
  readonly #later: EngineWritesParts['later'];

  constructor({ parts, holdings, session, isDead, later }: EngineWritesParts) {
    this.#parts = parts;
    this.#holdings = holdings;
    this.#session = session;
    this.#isDead = isDead;
    this.#later = later;
  }

  /** Nobody else has written to its slots. */
  check(): void {
    for (const [slot, { hash, written }] of this.slots) if (written) this.#mustBeWritten(slot, hash);
  }

  /** Computes the blocks from `from` on, and stores them. */
  save(chain: readonly HashKey[], from: number): void {
    if (from >= chain.length) return;
    const hashes = chain.slice(from);
    this.#session.reserve(from === 0 ? null : chain[from - 1]!, hashes, (answers) => this.#copy(hashes, answers));
  }

  #copy(hashes: readonly HashKey[], answers: readonly Reservation[]): void {
    const { node, space, tally } = this.#parts;
    if (answers.length !== hashes.length) throw new Violation('law 2: not every block that was asked for is answered');
    const mine: number[] = [];
    for (const [at, { slot, status, reason }] of answers.entries()) {
      tally(`reserve.${reason === '' ? status : reason}`);
      if ((slot !== undefined) !== (status === 'reserved'))
        throw new Violation('law 3: a slot, or none, against its status');
      if (slot === undefined) continue;
      if (this.slots.has(slot)) throw new Violation(`law 1: the slot at ${slot} is reserved twice`);
      this.slots.set(slot, { hash: hashes[at]!, written: false });
      mine.push(slot);
    }
    if (mine.length === 0) return;
    this.#later(0, 6, 'engine copies', () => {
      if (this.#isDead()) return;
      for (const slot of mine) {
        const reserved = this.slots.get(slot)!;
        contentOf(space.namespace, reserved.hash).payload.copy(node.memory, slot + headerBytes);
        reserved.written = true;
      }
      this.#later(0, 4, 'engine has copied', () => this.#finish(mine));
    });
  }

  #finish(slots: readonly number[]): void {
    if (this.#isDead()) return;
    const { space, tally } = this.#parts;
    const blocks = slots.map((slot) => this.slots.get(slot)!);
    for (const [at, slot] of slots.entries()) this.#mustBeWritten(slot, blocks[at]!.hash);
    for (const slot of slots) this.slots.delete(slot);
    if (this.#parts.node.world.chance(0.07)) {
      this.#session.askSteps(
        () => this.#holdings.aborting(slots),
        (count) => tally('abort', count),
      );
      return;
    }
    const hashes = blocks.map(({ hash }) => hash);
    const checksums = hashes.map((hash) => contentOf(space.namespace, hash).checksum);
    this.#session.askSteps(
      () => this.#commit(hashes, slots, checksums),
      (count) => tally('commit', count),
    );
  }

  /** Their time begins with the commit's first step. */
  *#commit(hashes: readonly HashKey[], slots: readonly number[], checksums: readonly bigint[]): Steps<number> {
    const { node, space, committed, ttlS, ends } = this.#parts;
    for (const hash of hashes) {
      const name = space.namespace.key + hash;
      committed.add(name);
      const endMs =
        ttlS === 0 || node.isClockWrong ? Number.POSITIVE_INFINITY : this.#parts.node.world.nowMs + ttlS * 1000;
      ends.set(name, Math.max(ends.get(name) ?? 0, endMs));
    }
    this.#parts.node.world.note(`${node.name} commits ${hashes.map(shortName).join(' ')}`);
    return yield* this.#holdings.committing(slots, checksums);
  }

  #mustBeWritten(slot: number, hash: HashKey): void {
    const { node, space } = this.#parts;
    const { payload } = contentOf(space.namespace, hash);
    const at = slot + headerBytes;
    if (payload.compare(node.memory, at, at + payload.length) !== 0) {
      throw new Violation(`law 1: ${node.name}: the reserved slot at ${slot} was written by somebody else`);
    }
  }
}
