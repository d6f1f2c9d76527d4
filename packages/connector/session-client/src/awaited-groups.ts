/**
 * One load of what another engine computes meanwhile, in a model of several attention groups. Groups that see everything get their
 * blocks as the other engine goes on; one with a window wants the end of the prefix alone, and nothing comes for it until then:
 *
 *     full      ■ ■ ■ ■ ■ ■ ■ ■        one after the other: here a stall shows
 *     window    · · · · · · ■ ■        all at the end: waits as long as the load may take, or until the others have ended short
 *
 * A window's blocks are of use only with the whole prefix, so where that is not to come any more, they are not waited for.
 */
import type { AwaitedLoad } from '@kvtier/scheduler';
import type { GroupPart } from './groups.ts';
import type { LoadOutcome, LoadRun } from './load.ts';

export class AwaitedGroups {
  readonly #windows: readonly number[];
  readonly #blocks: number;
  readonly #runs = new Map<GroupPart, Pick<LoadRun, 'limit'>>();
  #limit: number;
  #teller: GroupPart | undefined;
  #reason = '';

  /** @param windows of each group, in blocks; Infinity: it sees everything */
  constructor(windows: readonly number[], blocks: number) {
    this.#windows = windows;
    this.#blocks = blocks;
    this.#limit = blocks;
  }

  /** Why the load came short, by the first group that did; '' while none has. */
  get reason(): string {
    return this.#reason;
  }

  /** How long this group's part is waited for. */
  patienceOf(part: GroupPart, { stallMs, deadlineMs, onCame }: AwaitedLoad): AwaitedLoad {
    if (!this.#isWhole(part)) return { stallMs: deadlineMs, deadlineMs };
    // All groups that see everything have the same blocks at about the same time: one tells.
    const tells = this.#teller === undefined || this.#teller === part;
    if (tells) this.#teller = part;
    return { stallMs, deadlineMs, onCame: tells && part.from === 0 ? onCame : undefined };
  }

  add(part: GroupPart, run: Pick<LoadRun, 'limit'>): void {
    this.#runs.set(part, run);
  }

  /** No more than the first `blocks` blocks of the load are waited for. */
  limit(blocks: number): void {
    this.#limit = Math.min(blocks, this.#blocks);
    for (const [part, run] of this.#runs) this.#tell(part, run);
  }

  /** A group's part has ended; where it came short, the others need not go on. */
  ended(part: GroupPart, { loaded, reason }: LoadOutcome): void {
    this.#runs.delete(part);
    const end = part.from + loaded;
    if (end >= this.#blocks) return;
    this.#reason ||= reason;
    this.limit(Math.min(this.#limit, end));
  }

  #tell(part: GroupPart, run: Pick<LoadRun, 'limit'>): void {
    const isOfUse = this.#isWhole(part) || this.#limit >= this.#blocks;
    run.limit(isOfUse ? Math.max(0, this.#limit - part.from) : 0);
  }

  #isWhole({ group }: GroupPart): boolean {
    return this.#windows[group] === Number.POSITIVE_INFINITY;
  }
}
