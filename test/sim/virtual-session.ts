/**
 * The node's end of an engine's session, as the server has it (packages/store/session: connection.ts, requests.ts): requests are begun
 * in their order; what is done to many blocks goes on step by step, and what the session asks after it waits.
 *
 *     one session     │ a · a · a │ b │ c · c │        · : other sessions, tiers, ends, evictions, deaths
 *
 * A reservation of blocks that are looked at begins when it is known which of them are sound, and keeps nothing waiting until then.
 */
import type { HashKey } from '@kvtier/identity';
import type { Holdings, Reservation, Steps } from '@kvtier/placement';
import type { Life, World } from './world.ts';

export interface VirtualSessionParts {
  readonly world: World;
  /** Of the node. */
  readonly life: Life;
  readonly holdings: Holdings;
  readonly report: (error: unknown) => void;
  readonly tally: (what: string) => void;
  /** Between two steps: the engine may die here. */
  readonly between: () => void;
}

interface Begun {
  readonly steps: Steps<unknown>;
  readonly answered: (value: never) => void;
  readonly failed: (error: unknown) => void;
}

export class VirtualSession {
  readonly #parts: VirtualSessionParts;
  /** That a turn has time for one step more: always, now and then, never. */
  readonly #hasTime: number;
  #asked: (() => void)[] = [];
  /** Begun, and not answered yet: the first of them goes on. */
  #begun: Begun[] = [];
  /** Reservations that have not begun, and keep nothing waiting. */
  #lookedAt = 0;
  #isRunning = false;
  #isWaiting = false;
  #hasLeft = false;

  constructor(parts: VirtualSessionParts) {
    this.#parts = parts;
    this.#hasTime = parts.world.pick([1, 1, 0.6, 0.3, 0]);
  }

  /** Every request has its answer. */
  get isIdle(): boolean {
    return this.#asked.length + this.#begun.length + this.#lookedAt === 0;
  }

  /** What one turn answers. */
  ask(request: () => void): void {
    if (this.#hasLeft) return;
    this.#asked.push(request);
    if (!this.#isRunning && !this.#isWaiting) this.#goOn();
  }

  /** What takes steps. `steps` is called in its turn. */
  askSteps<T>(steps: () => Steps<T>, answered: (value: T) => void, failed = this.#parts.report): void {
    this.ask(() => this.#begun.push({ steps: steps(), answered, failed }));
  }

  reserve(parent: HashKey | null, hashes: readonly HashKey[], answered: (reservations: Reservation[]) => void): void {
    const { holdings, report } = this.#parts;
    this.ask(() => {
      const begin = (): void =>
        void this.#begun.push({ steps: holdings.reserving(parent, hashes), answered, failed: report });
      const settled = holdings.settled(hashes);
      if (settled === undefined) {
        begin();
        return;
      }
      this.#lookedAt++;
      void settled.then(() => {
        this.#lookedAt--;
        if (!holdings.isConnected) return;
        begin();
        this.#later();
      });
    });
  }

  /** The connection has ended, or is about to: what was begun is not finished. */
  leave(): void {
    this.#hasLeft = true;
    this.#asked = [];
    for (const { steps } of this.#begun.splice(0)) steps.return(undefined);
  }

  #goOn(): void {
    this.#isRunning = true;
    try {
      this.#finish();
      while (this.#begun.length === 0 && this.#asked.length > 0) {
        this.#asked.shift()!();
        if (this.#mayGoOn()) this.#finish();
      }
    } catch (error) {
      this.#parts.report(error);
    }
    this.#isRunning = false;
    if (this.#begun.length > 0) this.#later();
  }

  /** A step at least. */
  #finish(): void {
    for (let first = this.#begun[0]; first !== undefined; first = this.#begun[0]) {
      try {
        const step = first.steps.next();
        if (step.done) {
          this.#begun.shift();
          first.answered(step.value as never);
        }
      } catch (error) {
        if (this.#begun[0] === first) this.#begun.shift();
        first.failed(error);
      }
      if (!this.#mayGoOn()) return;
    }
  }

  #mayGoOn(): boolean {
    return this.#hasTime === 1 || this.#parts.world.chance(this.#hasTime);
  }

  #later(): void {
    if (this.#isWaiting) return;
    this.#isWaiting = true;
    const { world, life, tally, between } = this.#parts;
    tally('session.in steps');
    const delayUs = world.chance(0.5) ? 0 : world.between(1, world.chance(0.1) ? 20_000 : 1_000);
    const goOn = (): void => {
      this.#isWaiting = false;
      if (!this.#hasLeft && this.#begun.length > 0) between();
      if (!this.#hasLeft) this.#goOn();
    };
    world.schedule(delayUs, 'a session goes on', goOn, life);
  }
}
