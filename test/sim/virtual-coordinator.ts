/**
 * The workers as one coordinator has them: what it sent counts with it alone until the worker has it, and when it dies its memory is gone,
 * what it asked for ends at the workers when they hear of it, and nothing of it is done any more.
 */
import type { HandOffEngines } from '@kvtier/handoff';
import type { OnEvent, Worker } from '@kvtier/registry';
import type { GenerateRequest } from '@kvtier/wire/grpc';
import type { VirtualCall, VirtualWorkers } from './virtual-workers.ts';
import type { World } from './world.ts';

type Share = Parameters<HandOffEngines['sent']>[1];
/** A coordinator that has died waits for nothing, and nothing of it goes on. */
const never = <T>(): Promise<T> => new Promise(() => {});

export class CoordinatorEngines implements HandOffEngines {
  /** Sent, and not ended; by worker. */
  readonly open: readonly Set<Share>[];
  readonly #sent: readonly Set<Share>[];
  readonly #views: readonly Worker[];
  readonly #nodes: ReturnType<NonNullable<HandOffEngines['nodes']>>;
  readonly #workers: VirtualWorkers;
  readonly #calls = new Set<VirtualCall>();
  readonly #onCall: (call: VirtualCall) => void;
  #diedMs = Number.POSITIVE_INFINITY;

  constructor(workers: VirtualWorkers, onCall: (call: VirtualCall) => void) {
    this.#workers = workers;
    this.#onCall = onCall;
    this.open = workers.all.map(() => new Set());
    this.#sent = workers.all.map(() => new Set());
    this.#nodes = workers.all.map(({ record, peers }) => ({
      ...{ name: record.node!, peer: null, events: null },
      ...(peers !== undefined && { peers: [...peers] }),
    }));
    // The same workers, whose load has what this coordinator has sent in it.
    this.#views = workers.all.map((worker, number) => Object.create(worker, { sent: { value: this.#sent[number] } }));
  }

  /** Infinity: it lives. */
  get diedMs(): number {
    return this.#diedMs;
  }

  get isDead(): boolean {
    return Number.isFinite(this.#diedMs);
  }

  has(call: VirtualCall): boolean {
    return this.#calls.has(call);
  }

  forget(call: VirtualCall): void {
    this.#calls.delete(call);
  }

  /** Its process ends now; workers hear of it when its connections close. `isHeard` false: they never do (a defect). */
  die(world: World, isHeard: boolean): void {
    this.#diedMs = world.nowMs;
    for (const set of [...this.open, ...this.#sent]) set.clear();
    for (const call of isHeard ? this.#calls : [])
      world.schedule(world.between(50, 4_000), 'connection closes', () => this.#workers.abandon(call));
  }

  /** A worker has this call: its share counts no more. */
  taken({ worker, request }: VirtualCall): void {
    for (const share of this.#sent[worker.number]!)
      if (share.requestId === request.requestId) this.#sent[worker.number]!.delete(share);
  }

  workers(): readonly Worker[] {
    return this.#views;
  }

  nodes(): ReturnType<NonNullable<HandOffEngines['nodes']>> {
    return this.#nodes;
  }

  onChange(listener: () => void): () => void {
    return this.#workers.onChange(() => {
      if (!this.isDead) listener();
    });
  }

  onLoad(listener: () => void): () => void {
    return this.onChange(listener);
  }

  sent(number: number, share: Share): ReturnType<HandOffEngines['sent']> {
    if (this.isDead) return { firstToken: () => {}, ended: () => {} };
    const [sent, open] = [this.#sent[number]!, this.open[number]!];
    sent.add(share);
    open.add(share);
    const ended = (): void => {
      sent.delete(share);
      open.delete(share);
    };
    return { firstToken: () => {}, ended };
  }

  engine(number: number): ReturnType<HandOffEngines['engine']> {
    const engine = this.#workers.engine(number);
    return {
      tellFirstToken: (...all) => this.#unlessDead(() => engine.tellFirstToken(...all)),
      changeHandOff: (...all) => this.#unlessDead(() => engine.changeHandOff(...all)),
    };
  }

  follow(number: number, request: GenerateRequest, signal: AbortSignal, onEvent: OnEvent): Promise<void> {
    return this.#unlessDead(() => {
      const told: OnEvent = (event) => (this.isDead ? undefined : onEvent(event));
      return this.#workers.follow(number, request, signal, told, (call) => {
        this.#calls.add(call);
        this.#onCall(call);
      });
    });
  }

  #unlessDead<T>(ask: () => Promise<T>): Promise<T> {
    if (this.isDead) return never();
    return new Promise((resolve, reject) => {
      ask().then(
        (value) => this.isDead || resolve(value),
        (error: unknown) => this.isDead || reject(error),
      );
    });
  }
}
