/**
 * One seed, two coordinators before the same prefill and decode workers in virtual time: requests come, clients leave; workers, their nodes
 * and coordinators die and come back; workers stop, links between nodes are cut. Real: the dispatcher, the decision, the hand-offs and the
 * tries of an answer. Model: the workers with their nodes and links.
 *
 *     chaos: requests and faults ──▶ calm: no more of either, until all requests have ended ──▶ rest: nothing is left
 *
 * Laws, checked after every event: **a promise that nobody holds any more is gone within its bound** (a call, a request's share of a
 * worker's load, room, blocks on their way: all belong to a request that goes on; a prefill worker's call besides to a decode worker
 * that waits for its blocks, for at most `messageMs` longer; what a coordinator had that died, `messageMs` after it); each coordinator's hand-offs are bounded; a prefill worker is asked only after the decode
 * worker has its room, and for what it lacks; only workers that are ready and of the role are asked. In the end: every request has
 * ended, in time, with all of its tokens or an error that its client may have.
 */
import { Expected, Tries } from '@kvtier/api-server/testing';
import { Dispatcher, Saturated } from '@kvtier/dispatch';
import { KvError } from '@kvtier/errors';
import { type Asked, type HandOffEngines, type HandOffLimits, HandOffs } from '@kvtier/handoff';
import { maxMedia } from '@kvtier/kv-index';
import { createLogger } from '@kvtier/telemetry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import { installTime } from './platform.ts';
import type { SimResult } from './simulation.ts';
import { strayToken, tokenAt } from './virtual-call.ts';
import { CoordinatorEngines } from './virtual-coordinator.ts';
import { blockTokens, type VirtualCall, VirtualWorker, VirtualWorkers } from './virtual-workers.ts';
import { Violation, World } from './world.ts';

export interface HandOffSimOptions {
  readonly seed: number;
  /** Events of the chaos. */
  readonly steps?: number;
  readonly verbose?: boolean;
  /** Defects, planted between the coordinator and its workers: what it asks of them is bent. */
  readonly bend?: (engines: HandOffEngines) => Partial<HandOffEngines>;
  readonly limits?: Partial<HandOffLimits>;
  /** So many workers, each with a node, and so many peers at most of each node; absent: a few, and all are peers. */
  readonly nodes?: { readonly count: number; readonly maxPeers: number };
  /** A defect of workers: they go on with what a coordinator had that has died. */
  readonly ignoresDeaths?: boolean;
}

export const defaultHandOffSteps = 3_000;
/** A message takes at most so long: what it ends may be there until then. */
const messageMs = 5;
const calmSteps = 400_000;
/** Of one request, all tries with it. */
const endsWithinMs = 180_000;
const limits = {
  stallMs: 300,
  deadlineMs: 8_000,
  maxLegs: 8,
  maxLegsPerWorker: 5,

  itlMs: 30,
  tries: 2,
};
const silent = createLogger('simulation', 'silent');

/** One coordinator, from its start to its death. */
interface Coordinator {
  readonly name: string;
  readonly engines: CoordinatorEngines;
  readonly dispatch: Dispatcher;
  readonly handOffs: HandOffs;
}

/** A client's request, from its arrival to its end. */
interface Life {
  readonly id: string;
  readonly coordinator: Coordinator;
  readonly beganMs: number;
  readonly leave: AbortController;
  readonly calls: Set<VirtualCall>;
  /** When its client left. */
  leftMs: number;
  tokens: number;
}

export async function simulateHandOffs(options: HandOffSimOptions): Promise<SimResult> {
  const world = new World(options.seed, options.verbose === true ? Number.POSITIVE_INFINITY : 30);
  const uninstall = installTime(world);
  const simulation = new Simulation(world, options);
  const onRejection = (error: unknown): void => simulation.report(error);
  process.on('unhandledRejection', onRejection);
  let failure: string | undefined;
  try {
    await simulation.run(options.steps ?? defaultHandOffSteps);
  } catch (thrown) {
    failure = thrown instanceof Violation ? thrown.message : String((thrown as Error).stack ?? thrown);
  } finally {
    uninstall();
    process.off('unhandledRejection', onRejection);
  }
  return {
    ...{ seed: options.seed, failure, steps: world.steps, digest: world.digest.toString(16).padStart(8, '0') },
    tally: simulation.tally,
    lines: world.lines,
  };
}

class Simulation {
  readonly tally: Record<string, number> = {};
  readonly #world: World;
  readonly #workers: VirtualWorkers;
  readonly #coordinators: Coordinator[];
  /** Those that have died while workers may still have something of theirs. */
  readonly #dead = new Set<Coordinator>();
  readonly #lives = new Map<string, Life>();
  /** Since when a prefill worker computes for nobody. */
  readonly #unwanted = new Map<VirtualCall, number>();
  readonly #calls = new Set<VirtualCall>();
  readonly #options: HandOffSimOptions;
  readonly #policy: 'predicted' | 'least-loaded' | 'round-robin';
  readonly #prefillServes: boolean;
  readonly #split: 'predicted' | 'always';
  #failure: unknown;
  #count = 0;
  #isCalm = false;

  constructor(world: World, options: HandOffSimOptions) {
    this.#world = world;
    this.#options = options;
    const roles = ['prefill', 'decode', 'both'] as const;
    const { count, maxPeers } = options.nodes ?? { count: world.between(2, 5), maxPeers: Number.POSITIVE_INFINITY };
    const all = Array.from({ length: count }, (_, number) => {
      const role = number < 2 ? roles[number]! : world.pick(roles);
      const lie = world.chance(0.2) ? world.pick([0.2, 5]) : 1;
      return new VirtualWorker(number, role, world.between(120, 600), world.between(1_000, 8_000), lie);
    });
    for (const worker of all) worker.choosePeers(all, maxPeers);
    this.#workers = new VirtualWorkers(world, all);
    this.#workers.strays = 0.05;
    this.#workers.onTaken = (call) => {
      for (const { engines } of this.#coordinators) if (engines.has(call)) engines.taken(call);
    };
    this.#policy = world.pick(['predicted', 'least-loaded', 'round-robin'] as const);
    this.#prefillServes = world.chance(0.8);
    this.#split = world.pick(['predicted', 'predicted', 'always'] as const);
    this.#coordinators = ['a', 'b'].map((name) => this.#begin(name));
  }

  #begin(name: string): Coordinator {
    const { bend = () => ({}), limits: others = {} } = this.#options;
    const straight = new CoordinatorEngines(this.#workers, (call) => {
      try {
        this.#called(call);
      } catch (error) {
        this.report(error); // whoever calls takes what is thrown for a failure of the worker
      }
    });
    const bent = bend(straight);
    const engines: HandOffEngines = new Proxy(straight, {
      get: (target, key) => {
        const value = Reflect.get(bent, key) ?? Reflect.get(target, key, target);
        return typeof value === 'function' ? value.bind(target) : value;
      },
    });
    const holdings = {
      match: (_: string, keys: Int32Array, numbers: readonly number[]) =>
        numbers.map((number) => {
          const blocks = Math.min(this.#workers.heldBy(number, keys[0]!), keys.length / 2);
          const byMedium = new Int32Array(maxMedia);
          byMedium[0] = blocks;
          return { blocks, byMedium };
        }),
    };
    const [policy, prefillServes] = [this.#policy, this.#prefillServes];
    const random = (): number => this.#world.random();
    const dispatch = new Dispatcher({ workers: engines, holdings, policy, prefillServes, random, maxWaitMs: 5_000 });
    const limited = { ...limits, split: this.#split, fallback: prefillServes, ...others };
    const handOffs = new HandOffs({ engines, holdings, logger: silent, limits: limited });
    return { name, engines: straight, dispatch, handOffs };
  }

  report(error: unknown): void {
    this.#failure ??= error;
  }

  async run(steps: number): Promise<void> {
    this.#arrive();
    this.#fault();
    while (this.#world.steps < steps && (await this.#step()));
    this.#isCalm = true;
    for (let left = calmSteps; this.#lives.size > 0 && left > 0 && (await this.#step()); left--);
    if (this.#lives.size > 0) throw new Violation(`law 2: ${[...this.#lives.keys()].join(', ')} never ended`);
    for (let left = 10_000; left > 0 && (await this.#step()); left--);
    for (const { dispatch } of this.#coordinators) dispatch.close();
    this.#atRest();
  }

  async #step(): Promise<boolean> {
    const goesOn = await this.#world.step();
    if (this.#failure !== undefined) throw this.#failure;
    this.#check();
    return goesOn;
  }

  #note(what: string): void {
    this.tally[what] = (this.tally[what] ?? 0) + 1;
    this.#world.note(what);
  }

  #arrive(): void {
    if (this.#isCalm) return;
    const world = this.#world;
    void this.#answer();
    world.schedule(world.between(1_000, world.chance(0.1) ? 400_000 : 90_000), 'arrives', () => this.#arrive());
  }

  #fault(): void {
    if (this.#isCalm) return;
    const world = this.#world;
    const worker = world.pick(this.#workers.all);
    const kind = world.pick(['worker', 'worker', 'worker', 'node', 'link', 'coordinator'] as const);
    if (kind === 'worker') this.#hurt(worker);
    else if (kind === 'node' && !worker.isNodeDown) {
      this.#note('fault.node');
      this.#workers.killNode(worker, world.between(100, 3_000));
    } else if (kind === 'link' && !worker.isLinkCut) {
      this.#note('fault.link');
      this.#workers.cutLink(worker, world.between(20, 2_000));
    } else if (kind === 'coordinator') this.#mourn(world.pick(this.#coordinators));
    world.schedule(world.between(200_000, 4_000_000), 'fault', () => this.#fault());
  }

  #hurt(worker: VirtualWorker): void {
    const world = this.#world;
    if (worker.state !== 'ready' || worker.isStopped || world.chance(0.3)) return;
    if (world.chance(0.5)) {
      this.#note('fault.kill');
      this.#workers.kill(worker, world.between(100, 2_000));
    } else {
      this.#note('fault.stop');
      this.#workers.stop(worker, world.between(50, 3_000));
    }
  }

  /** It dies, its clients' connections with it, and another one begins in its place, which knows nothing. */
  #mourn(coordinator: Coordinator): void {
    if (this.#isCalm || coordinator.engines.isDead) return;
    this.#note('fault.coordinator');
    coordinator.engines.die(this.#world, this.#options.ignoresDeaths !== true);
    this.#dead.add(coordinator);
    for (const life of this.#lives.values()) {
      if (life.coordinator !== coordinator) continue;
      this.#lives.delete(life.id);
      this.#note('answer.lost');
    }
    const at = this.#coordinators.indexOf(coordinator);
    this.#coordinators[at] = this.#begin(`${coordinator.name}'`);
  }

  /** One request, as the API server answers it. */
  async #answer(): Promise<void> {
    const world = this.#world;
    const id = `r${this.#count++}`;
    const leave = new AbortController();
    const leftMs = Number.POSITIVE_INFINITY;
    const coordinator = world.pick(this.#coordinators);
    const life: Life = { id, coordinator, beganMs: world.nowMs, leave, calls: new Set(), tokens: 0, leftMs };
    this.#lives.set(id, life);
    const wanted = world.between(1, 12);
    const prompt = world.between(0, 30);
    const ids = new Array<number>(world.between(1, 1_500)).fill(prompt);
    const ttftMs = world.chance(0.2) ? world.between(50, 3_000) : undefined;
    const itlMs = world.chance(0.5) ? world.between(100, 2_000) : undefined;
    if (world.chance(0.3))
      world.schedule(world.between(0, 1_500_000), `${id}: its client leaves`, () => {
        life.leftMs = world.nowMs;
        leave.abort(new KvError('CANCELLED', 'the client ended the request'));
      });
    try {
      await this.#tries(life, ids, wanted, { ttftMs, itlMs });
      if (life.tokens !== wanted) throw new Violation(`law 1: ${id} has ${life.tokens} of ${wanted} tokens`);
      this.#note('answer.whole');
    } catch (error) {
      if (coordinator.engines.isDead) return; // nobody is there to say it
      if (error instanceof Saturated) this.#note('answer.saturated');
      else if (error instanceof KvError && ['CANCELLED', 'DISCONNECTED', 'BUSY'].includes(error.code))
        this.#note(`answer.${error.code}`);
      else this.report(error);
    }
    if (coordinator.engines.isDead) return;
    if (world.nowMs - life.beganMs > endsWithinMs) this.report(new Violation(`law 2: ${id} took too long`));
    this.#lives.delete(id);
  }

  async #tries(
    life: Life,
    ids: readonly number[],
    wanted: number,
    targets: Pick<Asked, 'ttftMs' | 'itlMs'>,
  ): Promise<void> {
    const { ttftMs } = targets;
    const { id, leave, beganMs, coordinator } = life;
    const { signal } = leave;
    const { dispatch, engines, handOffs } = coordinator;
    const expected = new Expected({ engines, awayMs: 0 });
    const tries = new Tries({ dispatch, engines, expected, tries: { maxTries: 5, withinMs: 10_000 } });
    const keys = new Int32Array(2 * Math.floor(ids.length / blockTokens)).fill(ids[0]!);
    for (;;) {
      const tokens = ids.length + life.tokens;
      const maxTokens = wanted - life.tokens;
      const firstTokenByMs = ttftMs === undefined || life.tokens > 0 ? undefined : beganMs + ttftMs;
      const routed = {
        ...{ id, model: 'demo', among: undefined, tokens, blockTokens, maxTokens, keys, session: '' },
        firstTokenByMs,
      };
      const choice = await tries.next(routed, signal);
      try {
        const request = requestOf(id, ids, tokens, maxTokens);
        const asked = { ...routed, ...targets, arrivedMs: beganMs, hasBegun: life.tokens > 0 };
        let hasToken = false;
        await handOffs.follow(
          ...([choice, asked, request, signal] as const),
          ({ tokenIds, handOff }) => {
            if (handOff !== undefined) throw new Violation('an event of the hand-off was passed on');
            if (!hasToken) choice.firstToken();
            hasToken = true;
            tries.progressed();
            for (const token of tokenIds) {
              const due = tokenAt(ids[0]!, ids.length + life.tokens++);
              if (token === due + strayToken) this.#note('answer.stray');
              else if (token !== due) throw new Violation(`law 1: ${id} was given token ${token}, ${due} is due`);
            }
          },
          ({ line, degraded }) => {
            this.#note(
              degraded ??
                line
                  .split(';')
                  .slice(line.startsWith('none') ? 1 : 2)[0]!
                  .trim(),
            );
          },
        );
        return;
      } catch (error) {
        if (error instanceof Violation) throw error;
        tries.failed(error, choice, signal);
        this.#note('moved');
      } finally {
        choice.ended();
      }
      if (life.tokens >= wanted) return;
    }
  }

  #called(call: VirtualCall): void {
    const { request, worker } = call;
    const id = lifeOf(request.requestId);
    const life = this.#lives.get(id);
    if (life === undefined) throw new Violation(`${request.requestId}: asked for a request that has ended`);
    this.#calls.add(call);
    if (request.prefillOnly === undefined) return void life.calls.add(call);
    if (worker.record.role === 'decode') throw new Violation(`${id}: a decode worker is asked for prefill`);
    const decode = [...life.calls].find(({ isOpen }) => isOpen);
    if (decode?.local === undefined)
      throw new Violation(`${id}: asked for prefill before the decode worker has its room`);
    if (decode.local >= decode.request.handOff!.blocks)
      throw new Violation(`${id}: asked for blocks that the decode worker holds`);
    if (request.prefillOnly.blocks !== decode.request.handOff!.blocks)
      throw new Violation(`${id}: asked for other blocks than the decode worker waits for`);
    if (!decode.worker.isPeerOf(worker))
      throw new Violation(`${id}: asked for blocks that cannot come: ${decode.worker.record.node} fetches from others`);
    this.#note('leg');
    // In the middle of what it has promised.
    const world = this.#world;
    if (world.chance(0.005))
      world.schedule(world.between(0, 400_000), 'dies amid a leg', () => this.#mourn(life.coordinator));
  }

  #check(): void {
    for (const { name, handOffs } of this.#coordinators)
      if (handOffs.legs > limits.maxLegs)
        throw new Violation(`law 3: ${handOffs.legs} legs of ${name}, ${limits.maxLegs} allowed`);
    this.#checkCalls();
    for (const { engines } of this.#coordinators)
      for (const open of engines.open)
        for (const { requestId } of open)
          if (!this.#lives.has(lifeOf(requestId)))
            throw new Violation(`promise: ${requestId} counts on a worker, its request has ended`);
    if (this.#lives.size === 0) this.#atRest();
  }

  #checkCalls(): void {
    const prefills = new Map<string, number>();
    for (const call of this.#calls) {
      if (!call.isOpen) {
        this.#calls.delete(call);
        this.#unwanted.delete(call);
        for (const { engines } of [...this.#coordinators, ...this.#dead]) engines.forget(call);
        continue;
      }
      let diedMs = Number.POSITIVE_INFINITY;
      for (const { engines } of this.#dead) if (engines.has(call)) ({ diedMs } = engines);
      if (diedMs < Number.POSITIVE_INFINITY) {
        if (this.#world.nowMs - diedMs > messageMs)
          throw new Violation(`promise: ${call.request.requestId} runs, its coordinator has died`);
        continue;
      }
      const life = this.#lives.get(lifeOf(call.request.requestId));
      if (life === undefined) throw new Violation(`promise: ${call.request.requestId} runs, its request has ended`);
      if (this.#world.nowMs - life.leftMs > messageMs)
        throw new Violation(`promise: ${call.request.requestId} runs, its client has left`);
      if (call.request.prefillOnly === undefined) continue;
      const place = `${life.coordinator.name} at w${call.worker.number}`;
      prefills.set(place, (prefills.get(place) ?? 0) + 1);
      this.#checkWanted(call, life);
    }
    for (const [place, count] of prefills)
      if (count > limits.maxLegsPerWorker) throw new Violation(`law 3: ${place} has ${count} legs`);
  }

  /** A prefill worker computes for a decode worker that waits for it. */
  #checkWanted(call: VirtualCall, life: Life): void {
    // A decode worker that waits no more says so with its first token.
    let [isWanted, isUntold] = [false, false];
    for (const { isOpen, awaited, hasGiven } of life.calls) {
      isWanted ||= isOpen && awaited !== undefined;
      isUntold ||= isOpen && !hasGiven;
    }
    if (isWanted) this.#unwanted.delete(call);
    else if (!this.#unwanted.has(call)) this.#unwanted.set(call, this.#world.nowMs);
    const sinceMs = this.#unwanted.get(call) ?? this.#world.nowMs;
    const boundMs = messageMs + (isUntold ? limits.deadlineMs : 0);
    if (this.#world.nowMs - sinceMs > boundMs)
      throw new Violation(`promise: ${call.request.requestId} computes for nobody`);
  }

  #atRest(): void {
    for (const { handOffs, dispatch, engines } of this.#coordinators) {
      const { legs, awaiting, pendingBlocks } = handOffs;
      const { waiting, given } = dispatch.stats();
      const sent = engines.open.reduce((sum, open) => sum + open.size, 0);
      const left = { legs, awaiting, pendingBlocks, waiting, given, sent };
      if (Object.values(left).some((count) => count !== 0))
        throw new Violation(`promise: nobody asks for anything, and this is left: ${JSON.stringify(left)}`);
    }
  }
}

/** Of a call's name, the request that it is for. */
const lifeOf = (requestId: string): string => {
  const end = requestId.indexOf('-prefill-');
  return end < 0 ? requestId : requestId.slice(0, end);
};

const requestOf = (requestId: string, ids: readonly number[], tokens: number, maxTokens: number): GenerateRequest => ({
  ...{
    requestId,
    promptTokenIds: new Array<number>(tokens).fill(ids[0]!),
    maxTokens,
    temperature: 0,
    topK: 0,
    topP: 1,
  },
  ...{ seed: undefined, ignoreEos: false, stopTokenIds: [], cacheSalt: '', loraName: '' },
});
