/**
 * Keeps a fixed set of service processes running: starts them in parallel, restarts what dies, stops them in order.
 *
 *   spawn ──{ready}──► ready ──exit──► waiting (bounded exponential backoff) ──► spawn
 *     └─exit before the first ready: the start fails with the service's last line
 *
 * Each service is a session leader of its own (Ctrl-C reaches only us, and we decide the order) with an IPC channel: it says
 * {ready: ...} on it, answers each {ping} with a {pong}, and its end tells the service that we are gone (see runService of
 * @kvtier/telemetry). One that is ready and then silent for `silenceMs` is killed, and so started again: counted in our own rounds,
 * so that a standstill of ours (a paused machine, SIGSTOP) is nobody's silence. Source of the idea: Erlang's one_for_one supervisors.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import type { Readable } from 'node:stream';
import { configExitCode, KvError } from '@kvtier/errors';
import { readLines } from './lines.ts';

export interface ServiceSpec {
  readonly name: string;
  /** What it calls itself in its complaints; absent: `name`. */
  readonly program?: string;
  /** Those of one stage are told to end together, lower ones first; absent: each by itself, in the order given. */
  readonly stage?: number;
  /** Arguments of the Node process: loader flags and the main file. */
  readonly nodeArgs: readonly string[];
  readonly env: Readonly<Record<string, string>>;
  /** Of its arguments, one that has to be there before it starts, readable by its owner alone. */
  readonly file?: { readonly path: string; readonly text: string };
}

export interface SupervisorOptions {
  /** Stopped in this order, or that of their stages. */
  readonly services: readonly ServiceSpec[];
  /** Every line a service writes. */
  onLine(service: string, line: string): void;
  /** Deaths and restarts, for a person. */
  onEvent(message: string): void;
  /**
   * Before a service is started again: looks after the place that all work in. Where that had gone and is there anew, returns who had
   * something there and so has to start again, too. @throws KvError: it is gone for good
   */
  restore?(): readonly string[];
  /** It is gone for good; nothing is started again from then on. */
  onLost?(error: KvError): void;
  readonly limits?: Partial<typeof supervisorLimits>;
}

export const supervisorLimits = {
  /** Until every service has said {ready}; a large model takes its time to load. */
  startMs: 600_000,
  /**
   * From the first SIGTERM to SIGKILL for all that is left. A service gets its SIGTERM when those before it have ended, and the last one
   * after half of this at the latest: what it writes down at its end (blocks, indexes) is worth more than the others' answers.
   */
  stopMs: 9_000,
  /** Between two questions whether a service is alive. */
  pingMs: 1_000,
  /** Without an answer for so long a service is killed: longer than any turn of a sound event loop, shorter than anybody's patience. */
  silenceMs: 30_000,
  /** What has ended may still be heard for so long, where a child of its own holds its output open. */
  lastWordsMs: 1_000,
  backoffMinMs: 200,
  backoffMaxMs: 10_000,
  /** A service that lived this long starts again from the shortest backoff. */
  stableMs: 30_000,
};

export class Supervisor {
  readonly #services: Service[];
  readonly #options: SupervisorOptions;
  readonly #limits: typeof supervisorLimits;

  constructor(options: SupervisorOptions) {
    this.#options = options;
    this.#limits = { ...supervisorLimits, ...options.limits };
    const mayRestart = (service: Service): boolean => this.#mayRestart(service);
    this.#services = options.services.map((spec) => new Service(spec, { ...options, mayRestart }, this.#limits));
  }

  #mayRestart(service: Service): boolean {
    let again: readonly string[] = [];
    try {
      again = this.#options.restore?.() ?? [];
    } catch (error) {
      for (const each of this.#services) each.retire();
      this.#options.onLost?.(KvError.from(error, 'SETUP'));
      return false;
    }
    for (const other of this.#services) if (other !== service && again.includes(other.name)) other.signal('SIGTERM');
    return true;
  }

  /**
   * Starts everything; resolves to what each service said when it was ready. When one ends before that, the others are stopped
   * and this rejects with its last line.
   */
  async start(): Promise<Map<string, Readonly<Record<string, unknown>>>> {
    let timer: NodeJS.Timeout | undefined;
    const late = new Promise<never>((_, reject) => {
      timer = setTimeout(() => {
        const names = this.#services.filter((service) => !service.isReady).map((service) => service.name);
        reject(
          new KvError(
            'DEADLINE',
            `${names.join(', ')}: not ready after ${this.#limits.startMs / 1000} s; see the lines above`,
          ),
        );
      }, this.#limits.startMs);
    });
    try {
      const ready = await Promise.race([Promise.all(this.#services.map((service) => service.start())), late]);
      return new Map(ready.map((values, index) => [this.#services[index]!.name, values]));
    } catch (error) {
      await this.stop();
      throw error;
    } finally {
      clearTimeout(timer);
    }
  }

  /** Stops all in order; after `stopMs` the rest is killed. Safe to call twice and during start. */
  async stop(): Promise<void> {
    for (const service of this.#services) service.retire();
    const { stopMs } = this.#limits;
    const begin = performance.now();
    const timer = setTimeout(() => this.kill(), stopMs);
    try {
      const stages = this.#stages();
      for (const [index, stage] of stages.entries()) {
        // Whoever is slow keeps the next ones waiting, but not beyond its share of the first half.
        const before = stages.slice(0, index).flatMap((services) => services.map(({ ended }) => ended));
        const latestMs = (stopMs / 2) * (index / Math.max(1, stages.length - 1));
        await within(Promise.all(before), latestMs - (performance.now() - begin));
        for (const service of stage) service.signal('SIGTERM');
      }
      await Promise.all(this.#services.map(({ ended }) => ended));
    } finally {
      clearTimeout(timer);
    }
  }

  #stages(): Service[][] {
    const stages = new Map<number, Service[]>();
    for (const [index, service] of this.#services.entries()) {
      const stage = service.stage ?? index;
      stages.set(stage, [...(stages.get(stage) ?? []), service]);
    }
    return [...stages].sort(([a], [b]) => a - b).map(([, services]) => services);
  }

  /** SIGKILL for every service, now. They come back unless `stop` was called. */
  kill(): void {
    for (const service of this.#services) service.signal('SIGKILL');
  }

  /** Process ids of what runs now, by service. */
  pids(): Map<string, number> {
    return new Map(this.#services.flatMap((service) => (service.pid ? [[service.name, service.pid] as const] : [])));
  }
}

/** `mayRestart`: asked before each start but the first. */
type ServiceOptions = Pick<SupervisorOptions, 'onLine' | 'onEvent'> & { mayRestart(service: Service): boolean };

/** One service: at most one process at a time. */
class Service {
  readonly name: string;
  readonly #spec: ServiceSpec;
  readonly #options: ServiceOptions;
  readonly #limits: typeof supervisorLimits;
  #child: ChildProcess | undefined;
  /** Resolves when the process that runs now has ended. */
  ended: Promise<unknown> = Promise.resolve();
  #retired = false;
  #wasReady = false;
  #backoffMs: number;
  #restart: NodeJS.Timeout | undefined;
  #lastLine = '';
  /** Its end said that what it was configured with cannot work. */
  #isMiswritten = false;
  #onReady: ((values: Readonly<Record<string, unknown>>) => void) | undefined;
  #onFirstDeath: ((error: KvError) => void) | undefined;

  constructor(spec: ServiceSpec, options: ServiceOptions, limits: typeof supervisorLimits) {
    this.name = spec.name;
    this.#spec = spec;
    this.#options = options;
    this.#limits = limits;
    this.#backoffMs = limits.backoffMinMs;
  }

  get stage(): number | undefined {
    return this.#spec.stage;
  }

  get isReady(): boolean {
    return this.#wasReady;
  }

  get pid(): number | undefined {
    return this.#child?.pid;
  }

  start(): Promise<Readonly<Record<string, unknown>>> {
    return new Promise((resolve, reject) => {
      this.#onReady = resolve;
      this.#onFirstDeath = reject;
      this.#spawn();
    });
  }

  /** No restart from now on. */
  retire(): void {
    this.#retired = true;
    clearTimeout(this.#restart);
  }

  signal(signal: NodeJS.Signals): void {
    this.#child?.kill(signal);
  }

  #spawn(): void {
    const begin = performance.now();
    let child: ChildProcess;
    try {
      child = spawn(process.execPath, [...this.#spec.nodeArgs], {
        detached: true,
        stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
        env: { ...process.env, ...this.#spec.env },
      });
    } catch (error) {
      // Of some shortages (memory) Node tells so, of others by 'error'.
      this.#lastLine = (error as Error).message;
      this.ended = Promise.resolve();
      this.#ended(begin, 'could not be started');
      return;
    }
    this.#child = child;
    for (const stream of outputsOf(child)) this.#readLines(stream);
    const watch = new Liveness(child, this.#limits, (why) => {
      this.#options.onEvent(`${this.name} ${why}; killing it`);
      child.kill('SIGKILL');
    });
    child.on('message', (message: unknown) => {
      watch.heard();
      if (typeof message !== 'object' || message === null || !('ready' in message)) return;
      watch.ready();
      if (this.#wasReady) this.#options.onEvent(`${this.name} is back`);
      this.#wasReady = true;
      this.#onReady?.(message.ready as Readonly<Record<string, unknown>>);
    });
    this.ended = new Promise<string>((resolve) => {
      child.on('error', (error) => {
        this.#lastLine = error.message; // could not be spawned; a failed signal or message ends in 'exit' anyway
        if (child.pid === undefined) resolve('could not be started');
      });
      child.once('exit', (code, signal) => {
        this.#isMiswritten = code === configExitCode;
        resolve(signal ? `was killed (${signal})` : `ended with exit code ${String(code)}`);
      });
    }).then(async (how) => {
      watch.end();
      await this.#lastWords(child);
      this.#ended(begin, how);
    });
  }

  /** Reads to the end of its output; not for ever: a child of its own may hold that open. */
  async #lastWords(child: ChildProcess): Promise<void> {
    const streams = outputsOf(child).filter((stream) => !stream.closed);
    await within(Promise.all(streams.map((stream) => once(stream, 'close'))), this.#limits.lastWordsMs);
    for (const stream of streams) stream.destroy();
  }

  #ended(begin: number, how: string): void {
    this.#child = undefined;
    if (!this.#wasReady) {
      const complaint = this.#complaint(this.#lastLine);
      const said = complaint ?? `${how}${this.#lastLine && `: ${this.#lastLine}`}`;
      this.#onFirstDeath?.(new KvError('SETUP', `${this.name}: ${said}`, { isFinal: this.#isMiswritten }));
      return;
    }
    if (this.#retired) return;
    if (performance.now() - begin >= this.#limits.stableMs) this.#backoffMs = this.#limits.backoffMinMs;
    this.#options.onEvent(`${this.name} ${how}; starting it again in ${this.#backoffMs / 1000} s`);
    this.#restart = setTimeout(() => {
      if (this.#options.mayRestart(this)) this.#spawn();
    }, this.#backoffMs);
    this.#backoffMs = Math.min(this.#backoffMs * 2, this.#limits.backoffMaxMs);
  }

  #readLines(stream: Readable): void {
    readLines(stream, (line) => {
      if (line.trim() === '') return;
      this.#lastLine = line;
      // Why a start failed is told once, by whoever called `start`.
      if (this.#wasReady || this.#complaint(line) === undefined) this.#options.onLine(this.name, line);
    });
  }

  /** What follows its own name in a line; undefined: it does not speak of itself. */
  #complaint(line: string): string | undefined {
    const prefix = `${this.#spec.program ?? this.name}: `;
    return line.startsWith(prefix) ? line.slice(prefix.length) : undefined;
  }
}

/** Of a process that could not be started for want of files there are none. */
const outputsOf = ({ stdout, stderr }: ChildProcess): Readable[] => [stdout, stderr].filter((stream) => !!stream);

/** Asks a process again and again whether its event loop turns, and whether a start comes to its end. */
class Liveness {
  readonly #child: ChildProcess;
  readonly #limits: typeof supervisorLimits;
  readonly #onSilent: (why: string) => void;
  readonly #timer: NodeJS.Timeout;
  #ready = false;
  /** Since it was heard of last; of a start, since its begin. */
  #rounds = 0;

  constructor(child: ChildProcess, limits: typeof supervisorLimits, onSilent: (why: string) => void) {
    this.#child = child;
    this.#limits = limits;
    this.#onSilent = onSilent;
    this.#timer = setInterval(() => this.#round(), limits.pingMs);
  }

  heard(): void {
    if (this.#ready) this.#rounds = 0;
  }

  ready(): void {
    this.#ready = true;
    this.#rounds = 0;
  }

  end(): void {
    clearInterval(this.#timer);
  }

  #round(): void {
    const limitMs = this.#ready ? this.#limits.silenceMs : this.#limits.startMs;
    this.#rounds++;
    if (this.#ready && this.#child.connected) this.#child.send({ ping: this.#rounds }, () => {});
    // What it has said meanwhile may lie in the channel already: let it in first.
    setImmediate(() => {
      if (this.#rounds * this.#limits.pingMs < limitMs) return;
      this.end();
      const seconds = limitMs / 1000;
      this.#onSilent(this.#ready ? `has not answered for ${seconds} s` : `is not ready after ${seconds} s`);
    });
  }
}

/** Resolves with `work`, or after `ms`; whether it works out is not told here. */
async function within(work: Promise<unknown>, ms: number): Promise<void> {
  let timer: NodeJS.Timeout | undefined;
  const late = new Promise<void>((resolve) => {
    timer = setTimeout(resolve, Math.max(0, ms));
  });
  await Promise.race([work.catch(() => {}), late]);
  clearTimeout(timer);
}
