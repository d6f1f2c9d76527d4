/**
 * Engine workers in virtual time, for the coordinator's hand-offs: one step at a time, room for so many blocks, a cache node beside each,
 * a link between nodes. A model: what it does of a hand-off is what `proto/kvtier/v1/engine.proto` says of it.
 *
 * Whoever calls is the only one that holds: a call that was cancelled, or whose worker died, holds nothing from then on.
 */
import { KvError } from '@kvtier/errors';
import type { HandOffEngines } from '@kvtier/handoff';
import type { OnEvent, Worker } from '@kvtier/registry';
import type { GenerateEvent, GenerateRequest } from '@kvtier/wire/grpc';
import { strayToken, tokenAt } from './virtual-call.ts';
import { blockTokens, needsOf, type Share, tokensOf, type VirtualCall, type VirtualWorker } from './virtual-worker.ts';
import type { World } from './world.ts';

export { blockTokens, type VirtualCall, VirtualWorker } from './virtual-worker.ts';

/** As the registry's line to a worker. */
const silentMs = 850;

export class VirtualWorkers implements HandOffEngines {
  readonly all: VirtualWorker[];
  readonly #world: World;
  readonly #listeners = new Set<() => void>();
  /** Of first tokens that prefill workers draw, those that no other worker would. */
  strays = 0;
  /** Told of each call when it begins. */
  onCall: (call: VirtualCall) => void = () => {};
  /** Told of each call that its worker has from now on: its share counts no more. */
  onTaken: (call: VirtualCall) => void = () => {};

  constructor(world: World, all: VirtualWorker[]) {
    this.#world = world;
    this.all = all;
  }

  workers(): readonly Worker[] {
    return this.all;
  }

  onChange(listener: () => void): () => void {
    this.#listeners.add(listener);
    return () => this.#listeners.delete(listener);
  }

  onLoad(listener: () => void): () => void {
    return this.onChange(listener);
  }

  sent(number: number, share: Share): ReturnType<HandOffEngines['sent']> {
    const worker = this.all[number]!;
    worker.sent.add(share);
    worker.open.add(share);
    const ended = (): void => {
      worker.sent.delete(share);
      worker.open.delete(share);
    };
    return { firstToken: () => {}, ended };
  }

  /** Blocks of a prompt at hand: the engine's and its node's. */
  heldBy(number: number, prompt: number): number {
    const { own, node } = this.all[number]!;
    return Math.max(own.get(prompt) ?? 0, node.get(prompt) ?? 0);
  }

  engine(number: number): ReturnType<HandOffEngines['engine']> {
    return {
      tellFirstToken: async (requestId, tokenId) => {
        await this.#pass(this.#world.between(100, 3_000));
        const call = this.all[number]!.calls.find(({ request }) => request.requestId === requestId);
        if (call === undefined || call.hasToken || call.isInStep || call.answerLeft < 2) return false;
        call.firstToken ??= tokenId;
        return true;
      },
      changeHandOff: async (requestId, blocks) => {
        await this.#pass(this.#world.between(100, 3_000));
        const call = this.all[number]!.calls.find(({ request }) => request.requestId === requestId);
        if (call?.awaited === undefined) return false;
        this.#stopAwaiting(call, Math.max(blocks, call.blocks));
        return true;
      },
    };
  }

  /** `onCall`: told of it when it begins, in place of this. */
  follow(
    number: number,
    request: GenerateRequest,
    signal: AbortSignal,
    onEvent: OnEvent,
    onCall = this.onCall,
  ): Promise<void> {
    const worker = this.all[number]!;
    return new Promise((resolve, reject) => {
      const end = (failure?: unknown): void => {
        if (!call.isOpen) return;
        this.#world.note(`w${number} ${request.requestId}: ended ${failure === undefined ? '' : String(failure)}`);
        close();
        if (failure === undefined) resolve();
        else reject(failure as Error);
      };
      const leave = (): void => end(signal.reason);
      const close = (): void => {
        call.isOpen = false;
        signal.removeEventListener('abort', leave);
        this.#leave(call);
      };
      const call: VirtualCall = {
        ...{ worker, request, onEvent, end, close, isOpen: true, hasRoom: false, local: undefined, blocks: 0 },
        ...{
          awaited: undefined,
          isBringing: false,
          hasToken: false,
          hasGiven: false,
          isInStep: false,
          firstToken: undefined,
          stallAtMs: 0,
          deadlineAtMs: 0,
          tokensLeft: tokensOf(request),
        },
        answerLeft: request.prefillOnly === undefined ? request.maxTokens : 0,
      };
      if (signal.aborted) return reject(signal.reason as Error);
      signal.addEventListener('abort', leave, { once: true });
      onCall(call);
      const blocks = request.prefillOnly?.blocks ?? request.handOff?.blocks ?? 0;
      this.#world.note(`w${number} ${request.requestId}: asked, ${blocks} blocks`);
      if (worker.state !== 'ready') return end(new KvError('DISCONNECTED', 'gone', { retry: true }));
      const { life } = worker;
      this.#world.schedule(this.#world.between(100, 2_000), 'message', () => {
        if (!call.isOpen) return undefined;
        // It was on its way when the worker died: its connection is closed.
        if (worker.life !== life) return end(new KvError('DISCONNECTED', `w${number} died`, { retry: true }));
        this.onTaken(call);
        for (const share of worker.sent) if (share.requestId === request.requestId) worker.sent.delete(share);
        if (worker.calls.length >= 24) return end(new KvError('BUSY', 'queue: full', { retry: true }));
        worker.calls.push(call);
        this.#work(worker);
        return undefined;
      });
    });
  }

  /** Its process dies; somebody finds out a little later. Its node lives. */
  kill(worker: VirtualWorker, backMs: number): void {
    worker.life++;
    worker.isStopped = false;
    worker.own.clear();
    worker.isStepping = false;
    const calls = worker.calls.splice(0);
    this.#world.schedule(this.#world.between(100, 50_000), 'found dead', () => this.#silent(worker, calls));
    this.#world.schedule(backMs * 1000 + 60_000, 'is back', () => this.#back(worker));
  }

  /** Whoever had this call has died: nobody is told anything of it any more. */
  abandon(call: VirtualCall): void {
    if (!call.isOpen) return;
    this.#world.note(`w${call.worker.number} ${call.request.requestId}: abandoned`);
    call.close();
  }

  /** The node beside it dies with all that it holds, and another one begins. The engine finds out: it loads nothing, and computes. */
  killNode(worker: VirtualWorker, backMs: number): void {
    worker.isNodeDown = true;
    worker.node.clear();
    this.#world.schedule(this.#world.between(100, 50_000), 'node found dead', () => {
      for (const call of [...worker.calls]) this.#isAlone(call);
    });
    this.#world.schedule(backMs * 1_000, 'node is back', () => {
      worker.isNodeDown = false;
      this.#bringAll();
    });
  }

  /** Its node reaches no other, for so long. */
  cutLink(worker: VirtualWorker, forMs: number): void {
    worker.isLinkCut = true;
    this.#world.schedule(forMs * 1_000, 'link is healed', () => {
      worker.isLinkCut = false;
      this.#bringAll();
    });
  }

  /** SIGSTOP, and SIGCONT after so long. */
  stop(worker: VirtualWorker, forMs: number): void {
    worker.isStopped = true;
    const { life } = worker;
    this.#world.schedule(silentMs * 1000, 'found silent', () => {
      if (worker.isStopped && worker.life === life) this.#silent(worker, worker.calls.splice(0));
    });
    this.#world.schedule(forMs * 1000, 'goes on', () => {
      if (worker.life !== life) return;
      worker.isStopped = false;
      this.#back(worker);
    });
  }

  #silent(worker: VirtualWorker, calls: readonly VirtualCall[]): void {
    worker.state = 'silent';
    this.#changed();
    const why = new KvError('DISCONNECTED', `w${worker.number} died`, { retry: true });
    for (const call of [...calls, ...worker.calls]) call.end(why);
  }

  /** Without its node nothing comes any more. */
  #isAlone(call: VirtualCall): void {
    if (call.isOpen && call.awaited !== undefined && call.worker.isNodeDown) this.#stopAwaiting(call, call.blocks);
  }

  #bringAll(): void {
    for (const { calls } of this.all) for (const call of calls) this.#later(500, call, () => this.#bring(call));
  }

  #back(worker: VirtualWorker): void {
    worker.state = 'ready';
    this.#changed();
    this.#work(worker);
  }

  #changed(): void {
    for (const listener of [...this.#listeners]) listener();
  }

  #leave(call: VirtualCall): void {
    const { calls } = call.worker;
    const at = calls.indexOf(call);
    if (at >= 0) calls.splice(at, 1);
    this.#world.schedule(0, 'room', () => this.#work(call.worker));
  }

  #pass(us: number): Promise<void> {
    return new Promise((resolve) => void this.#world.schedule(us, 'passes', resolve));
  }

  #later(us: number, call: VirtualCall, fn: () => void): void {
    const { life } = call.worker;
    this.#world.schedule(us, 'message', () => {
      if (call.isOpen && call.worker.life === life) fn();
    });
  }

  #tell(call: VirtualCall, part: Partial<GenerateEvent>, andEnds = false): void {
    this.#later(this.#world.between(50, 1_000), call, () => {
      const event = { tokenIds: [], finishReason: '', failure: undefined, ...part } as GenerateEvent;
      const { requestId } = call.request;
      if (event.tokenIds.length === 0) this.#world.note(`w${call.worker.number} ${requestId}: ${JSON.stringify(part)}`);
      else if (!call.hasGiven) this.#world.note(`w${call.worker.number} ${requestId}: its first token`);
      if (event.tokenIds.length > 0) call.hasGiven = true;
      try {
        if (call.onEvent(event) === false || andEnds) call.end();
      } catch (error) {
        call.end(error); // as the real calls do
      }
    });
  }

  /** Gives room, and takes a step if there is anything to do. */
  #work(worker: VirtualWorker): void {
    if (worker.isStopped || worker.state !== 'ready') return;
    for (const call of worker.calls) {
      if (call.hasRoom) continue;
      if (worker.usedBlocks + needsOf(call.request) > worker.facts!.totalBlocks) break;
      this.#begin(call);
    }
    if (worker.isStepping) return;
    let prompt = 0;
    const parts = new Map<VirtualCall, number>();
    const streams = worker.calls.filter(({ hasToken }) => hasToken);
    let chunk = worker.chunkBeside(streams);
    // What is left of a prompt that another worker has computed goes first.
    const isTail = ({ request, tokensLeft }: VirtualCall): boolean =>
      request.handOff !== undefined && tokensLeft <= blockTokens;
    for (const call of [...worker.calls.filter(isTail), ...worker.calls.filter((one) => !isTail(one))]) {
      if (!call.hasRoom || call.awaited !== undefined || call.tokensLeft === 0 || prompt >= chunk) continue;
      const { blocks, stepBlocks = 0 } = call.request.prefillOnly ?? { blocks: 0 };
      const most = stepBlocks * blockTokens;
      const tail = tokensOf(call.request) - blocks * blockTokens;
      if (stepBlocks > 0) chunk = Math.min(chunk, prompt + most + (call.tokensLeft <= most + tail ? tail : 0));
      const part = Math.min(call.tokensLeft, chunk - prompt);
      parts.set(call, part);
      call.isInStep = true;
      prompt += part;
    }
    if (parts.size === 0 && streams.length === 0) return;
    worker.isStepping = true;
    const { life } = worker;
    const { stepS, stepPerRequestS } = worker.steps;
    const takesS = stepS + streams.length * stepPerRequestS + prompt / worker.tokensPerS;
    const step = (): void => {
      if (worker.life !== life) return;
      if (worker.isStopped) return void this.#world.schedule(20_000, 'stopped', step);
      worker.isStepping = false;
      for (const call of parts.keys()) call.isInStep = false;
      for (const [call, part] of parts) if (call.isOpen) this.#computed(call, part);
      for (const call of streams) if (call.isOpen) this.#token(call);
      this.#work(worker);
    };
    this.#world.schedule(takesS * 1e6, 'step', step);
  }

  #begin(call: VirtualCall): void {
    const { worker, request } = call;
    call.hasRoom = true;
    const prompt = request.promptTokenIds[0]!;
    const isPrefill = request.prefillOnly !== undefined;
    const most = request.prefillOnly?.blocks ?? Math.floor((request.promptTokenIds.length - 1) / blockTokens);
    call.blocks = Math.min(isPrefill ? this.heldBy(worker.number, prompt) : (worker.own.get(prompt) ?? 0), most);
    call.tokensLeft = tokensOf(request) - call.blocks * blockTokens;
    if (isPrefill) {
      if (call.blocks > 0) this.#committed(call);
      else if (call.tokensLeft === 0) this.#tell(call, { finishReason: 'prefilled' }, true);
      return;
    }
    const { handOff } = request;
    if (handOff === undefined) return;
    call.local = Math.min(call.blocks, handOff.blocks);
    this.#tell(call, { handOff: { localBlocks: call.local, readyBlocks: 0 } });
    if (call.local >= handOff.blocks) return;
    call.awaited = handOff.blocks;
    call.deadlineAtMs = this.#world.nowMs + handOff.deadlineMs;
    this.#moved(call);
    if (worker.isNodeDown) this.#later(this.#world.between(100, 5_000), call, () => this.#isAlone(call));
    else this.#bring(call);
  }

  /** Another block came: the wait begins anew. */
  #moved(call: VirtualCall): void {
    const { stallMs } = call.request.handOff!;
    call.stallAtMs = Math.min(this.#world.nowMs + stallMs, call.deadlineAtMs);
    const { stallAtMs } = call;
    this.#later((stallAtMs - this.#world.nowMs) * 1000, call, () => {
      if (call.awaited !== undefined && call.stallAtMs === stallAtMs) this.#stopAwaiting(call, call.blocks);
    });
  }

  #stopAwaiting(call: VirtualCall, at: number): void {
    if (call.blocks < at) {
      call.awaited = at;
      return;
    }
    call.awaited = undefined;
    call.tokensLeft = tokensOf(call.request) - call.blocks * blockTokens;
    this.#work(call.worker);
  }

  /** The next block, from any node that has it. */
  #bring(call: VirtualCall): void {
    const { worker, request } = call;
    if (call.awaited === undefined || !call.isOpen || call.isBringing) return;
    const prompt = request.promptTokenIds[0]!;
    const isThere = (): boolean =>
      this.all.some((one) => (one.node.get(prompt) ?? 0) > call.blocks && worker.reaches(one));
    if (!isThere()) return; // it is told
    call.isBringing = true;
    const begins = Math.max(worker.linkFreeMs, this.#world.nowMs);
    worker.linkFreeMs = begins + 1000 / worker.linkBlocksPerS;
    this.#later((worker.linkFreeMs - this.#world.nowMs) * 1000, call, () => {
      call.isBringing = false;
      if (call.awaited === undefined || !isThere()) return;
      call.blocks++;
      call.tokensLeft -= blockTokens;
      this.#tell(call, { handOff: { localBlocks: call.local ?? 0, readyBlocks: call.blocks } });
      if (call.blocks >= call.awaited) return this.#stopAwaiting(call, call.blocks);
      this.#moved(call);
      this.#bring(call);
    });
  }

  #computed(call: VirtualCall, part: number): void {
    const { request } = call;
    call.tokensLeft -= part;
    const { prefillOnly, promptTokenIds } = request;
    const blocks = Math.floor((tokensOf(request) - call.tokensLeft) / blockTokens);
    call.blocks = Math.min(blocks, prefillOnly?.blocks ?? blocks);
    if (prefillOnly?.draws && call.tokensLeft === 0) {
      const stray = this.#world.chance(this.strays) ? strayToken : 0;
      this.#tell(call, { tokenIds: [tokenAt(promptTokenIds[0]!, promptTokenIds.length) + stray] });
      // The stream is in order: its end is told behind it.
      this.#later(1_000, call, () => this.#committed(call));
    } else if (prefillOnly !== undefined) this.#committed(call);
    else if (call.tokensLeft === 0) this.#first(call);
  }

  #first(call: VirtualCall): void {
    const { request } = call;
    call.worker.own.set(request.promptTokenIds[0]!, call.blocks);
    call.hasToken = true;
    this.#token(call, {
      cache: {
        ...{ promptTokens: request.promptTokenIds.length, cachedTokens: call.blocks * blockTokens, tokensByTier: {} },
        ...{ queueUs: 0, loadUs: 0, prefillUs: 0 },
      },
    });
  }

  #committed(call: VirtualCall): void {
    const { worker, request, blocks } = call;
    const prompt = request.promptTokenIds[0]!;
    // A node that has no room takes fewer.
    const kept = worker.isNodeDown ? 0 : this.#world.chance(0.02) ? Math.max(blocks - 1, 0) : blocks;
    if (kept > (worker.node.get(prompt) ?? 0)) {
      worker.node.set(prompt, kept);
      for (const { calls } of this.all)
        for (const other of calls)
          if (other.request.promptTokenIds[0] === prompt) this.#later(500, other, () => this.#bring(other));
    }
    const ready = Math.min(worker.node.get(prompt) ?? 0, request.prefillOnly!.blocks);
    const isDone = call.tokensLeft === 0;
    const handOff = { localBlocks: 0, readyBlocks: ready };
    this.#tell(call, isDone ? { handOff, finishReason: 'prefilled' } : { handOff }, isDone);
  }

  #token(call: VirtualCall, part: Partial<GenerateEvent> = {}): void {
    const { promptTokenIds, maxTokens } = call.request;
    const tokenIds = call.firstToken === undefined ? [] : [call.firstToken];
    call.firstToken = undefined;
    call.answerLeft -= tokenIds.length;
    tokenIds.push(tokenAt(promptTokenIds[0]!, promptTokenIds.length + maxTokens - call.answerLeft));
    call.answerLeft--;
    const isLast = call.answerLeft <= 0;
    this.#tell(call, { ...part, tokenIds, finishReason: isLast ? 'length' : '' }, isLast);
    if (isLast) call.hasToken = false;
  }
}
