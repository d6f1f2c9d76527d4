/**
 * All members, as the list in Redis has them: looked at by a short script a few times a second. A lease's end makes no message that
 * could be subscribed to, and a subscription that is dead looks like one with no news; a look costs its server some microseconds.
 *
 * Invariants: what comes out was parsed by the schemas, is bounded and sorted by name; members stay as they are while the servers
 * are away, and after that until they have had the time to come back (`missing.ts`): whose lease ended meanwhile could not renew it.
 */
import type { MemberServers, Membership } from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { RedisServers } from '@kvtier/redis';
import type { Log } from '@kvtier/runtime';
import { type Listed, MemberList } from './member-list.ts';
import { Missing } from './missing.ts';
import { Reasons } from './reasons.ts';
import { type Parsed, parseRecord } from './record.ts';
import { ServerClock } from './server-clock.ts';
import { Wakeable } from './wakeable.ts';

export interface MemberReaderOptions {
  readonly redis: MemberServers & Pick<RedisServers, 'place' | 'onProblem'>;
  readonly pollMs: number;
  /** All members, at each change. */
  readonly changed: (members: Membership) => void;
  /** Why what is known may be old, also when that is another reason than before; or undefined: all is well again. */
  readonly problem: (why: string | undefined) => void;
  readonly log: Log;
}

interface Member extends Listed {
  readonly parsed: Parsed;
  /** It said that it drains. */
  readonly isLeaving: boolean;
}

export class MemberReader {
  readonly #options: MemberReaderOptions;
  readonly #list: MemberList;
  readonly #pause = new Wakeable();
  readonly #running: Promise<void>;
  #known = { version: '', count: -1 };
  /** By id: those whose lease lasts, and those that were told last. */
  #live: ReadonlyMap<string, Member> = new Map();
  #told: ReadonlyMap<string, Member> = new Map();
  #hasTold = false;
  /** A connection was lost, or an answer, or some of the server's time: leases may have ended that nobody could renew. */
  #wasAway = false;
  /** On the clock of performance.now(): when the last look began that was answered. */
  #lookedMs = 0;
  readonly #clock = new ServerClock();
  readonly #missing = new Missing();
  readonly #reasons = new Reasons();
  #isClosed = false;

  /** Begins; tells nothing before the constructor has returned. KvError CONFIG for what can never work. */
  constructor(options: MemberReaderOptions) {
    this.#options = options;
    this.#list = new MemberList(options.redis, () => {
      this.#wasAway = true;
    });
    this.#running = this.#run();
  }

  /** Nothing is told after this has been called. */
  async close(): Promise<void> {
    this.#isClosed = true;
    this.#pause.end();
    this.#list.close();
    await this.#running;
  }

  async #run(): Promise<void> {
    const { pollMs } = this.#options;
    while (!this.#isClosed) {
      const beganMs = performance.now();
      try {
        const { version, count, nowMs, members } = await this.#list.look(this.#known);
        if (this.#isClosed) return;
        const answeredMs = performance.now();
        if (this.#clock.wentAhead(nowMs, beganMs, answeredMs)) this.#wasAway = true;
        const thereMs = this.#wasAway ? 0 : beganMs - this.#lookedMs;
        this.#lookedMs = beganMs;
        if (this.#wasAway) {
          this.#wasAway = false;
          if (this.#hasTold) this.#missing.beginGrace(answeredMs);
        }
        if (members !== undefined) this.#live = new Map(members.map((each) => [each.id, this.#read(each)]));
        this.#known = { version, count };
        this.#say(undefined);
        this.#tell(thereMs);
      } catch (error) {
        if (this.#isClosed) return;
        this.#wasAway = true;
        this.#list.reset();
        this.#say(`the list of members in Redis cannot be read (${KvError.from(error).message})`);
      }
      await this.#pause.wait(beganMs + pollMs - performance.now());
    }
  }

  #say(why: string | undefined): void {
    if (this.#reasons.isNews(why, performance.now())) this.#options.problem(why);
  }

  /** `thereMs`: so long the servers have been there for certain since the last time. */
  #tell(thereMs: number): void {
    const next = new Map(this.#live);
    const gone = [...this.#told.values()].filter(({ id }) => !next.has(id));
    const held = this.#missing.held(gone, this.#told.size, thereMs, performance.now());
    for (const member of held) next.set(member.id, member);
    const isSame =
      next.size === this.#told.size && [...next].every(([id, { text }]) => this.#told.get(id)?.text === text);
    if (isSame && this.#hasTold) return;
    this.#told = next;
    this.#hasTold = true;
    const parsed = [...next.values()].sort((a, b) => (a.id < b.id ? -1 : 1)).map((member) => member.parsed);
    this.#options.changed({
      workers: parsed.flatMap((each) => (each !== undefined && 'worker' in each ? [each.worker] : [])),
      nodes: parsed.flatMap((each) => (each !== undefined && 'node' in each ? [each.node] : [])),
    });
  }

  /** As it was parsed before, when it says the same. */
  #read(listed: Listed): Member {
    const before = this.#live.get(listed.id) ?? this.#told.get(listed.id);
    if (before?.text === listed.text) return before;
    const { parsed, why } = parseRecord(listed);
    if (why !== undefined) {
      this.#options.log.warn({ member: listed.id, reason: why }, 'a record that is none is ignored');
    }
    const isLeaving = parsed !== undefined && 'worker' in parsed && parsed.worker.draining;
    return { ...listed, parsed, isLeaving };
  }
}
