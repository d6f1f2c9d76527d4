/**
 * Keeps a fixed set of service processes running: starts them in parallel, restarts what dies, stops them in order.
 *
 *   spawn ──{ready}──► ready ──exit──► waiting (bounded exponential backoff) ──► spawn
 *     └─exit before the first ready: the start fails with the service's last line
 *
 * Each service is a session leader of its own (Ctrl-C reaches only us, and we decide the order) with an IPC channel: it says
 * {ready: ...} on it, and its end tells the service that we are gone (see runService of @kvtier/telemetry). Source of the idea:
 * Erlang's one_for_one supervisors.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { createInterface } from 'node:readline';
import type { Readable } from 'node:stream';
import { KvError } from '@kvtier/errors';

export interface ServiceSpec {
  readonly name: string;
  /** Arguments of the Node process: loader flags and the main file. */
  readonly nodeArgs: readonly string[];
  readonly env: Readonly<Record<string, string>>;
}

export interface SupervisorOptions {
  /** Stopped in this order. */
  readonly services: readonly ServiceSpec[];
  /** Every line a service writes. */
  onLine(service: string, line: string): void;
  /** Deaths and restarts, for a person. */
  onEvent(message: string): void;
  readonly limits?: Partial<typeof supervisorLimits>;
}

export const supervisorLimits = {
  /** Until every service has said {ready}; a large model takes its time to load. */
  startMs: 600_000,
  /** From the first SIGTERM to SIGKILL for all that is left. */
  stopMs: 8_000,
  backoffMinMs: 200,
  backoffMaxMs: 10_000,
  /** A service that lived this long starts again from the shortest backoff. */
  stableMs: 30_000,
};

export class Supervisor {
  readonly #services: Service[];
  readonly #limits: typeof supervisorLimits;

  constructor(options: SupervisorOptions) {
    this.#limits = { ...supervisorLimits, ...options.limits };
    this.#services = options.services.map((spec) => new Service(spec, options, this.#limits));
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
    const timer = setTimeout(() => this.kill(), this.#limits.stopMs);
    try {
      for (const service of this.#services) await service.terminate();
    } finally {
      clearTimeout(timer);
    }
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

/** One service: at most one process at a time. */
class Service {
  readonly name: string;
  readonly #spec: ServiceSpec;
  readonly #options: SupervisorOptions;
  readonly #limits: typeof supervisorLimits;
  #child: ChildProcess | undefined;
  #closed: Promise<unknown> = Promise.resolve();
  #retired = false;
  #wasReady = false;
  #backoffMs: number;
  #restart: NodeJS.Timeout | undefined;
  #lastLine = '';
  #onReady: ((values: Readonly<Record<string, unknown>>) => void) | undefined;
  #onFirstDeath: ((error: KvError) => void) | undefined;

  constructor(spec: ServiceSpec, options: SupervisorOptions, limits: typeof supervisorLimits) {
    this.name = spec.name;
    this.#spec = spec;
    this.#options = options;
    this.#limits = limits;
    this.#backoffMs = limits.backoffMinMs;
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

  async terminate(): Promise<void> {
    this.signal('SIGTERM');
    await this.#closed;
  }

  signal(signal: NodeJS.Signals): void {
    this.#child?.kill(signal);
  }

  #spawn(): void {
    const begin = Date.now();
    const child = spawn(process.execPath, [...this.#spec.nodeArgs], {
      detached: true,
      stdio: ['ignore', 'pipe', 'pipe', 'ipc'],
      env: { ...process.env, ...this.#spec.env },
    });
    this.#child = child;
    for (const stream of [child.stdout, child.stderr]) this.#readLines(stream!);
    child.on('message', (message: unknown) => {
      if (typeof message !== 'object' || message === null || !('ready' in message)) return;
      if (this.#wasReady) this.#options.onEvent(`${this.name} is back`);
      this.#wasReady = true;
      this.#onReady?.(message.ready as Readonly<Record<string, unknown>>);
    });
    child.on('error', (error) => {
      this.#lastLine = error.message; // could not be spawned; a failed signal or message ends in 'close' anyway
      if (child.pid === undefined) this.#ended(begin, 'could not be started');
    });
    this.#closed = once(child, 'close').then(
      ([code, signal]) =>
        this.#ended(begin, signal ? `was killed (${String(signal)})` : `ended with exit code ${String(code)}`),
      () => {}, // 'error' before 'close': handled above
    );
  }

  #ended(begin: number, how: string): void {
    this.#child = undefined;
    if (!this.#wasReady) {
      const prefix = `${this.name}: `;
      const said = this.#lastLine.startsWith(prefix)
        ? this.#lastLine
        : `${prefix}${how}${this.#lastLine && `: ${this.#lastLine}`}`;
      this.#onFirstDeath?.(new KvError('SETUP', said));
      return;
    }
    if (this.#retired) return;
    if (Date.now() - begin >= this.#limits.stableMs) this.#backoffMs = this.#limits.backoffMinMs;
    this.#options.onEvent(`${this.name} ${how}; starting it again in ${this.#backoffMs / 1000} s`);
    this.#restart = setTimeout(() => this.#spawn(), this.#backoffMs);
    this.#backoffMs = Math.min(this.#backoffMs * 2, this.#limits.backoffMaxMs);
  }

  #readLines(stream: Readable): void {
    createInterface({ input: stream, crlfDelay: Number.POSITIVE_INFINITY }).on('line', (line) => {
      if (line.trim() === '') return;
      this.#lastLine = line;
      // Why a start failed is told once, by whoever called `start`.
      if (this.#wasReady || !line.startsWith(`${this.name}: `)) this.#options.onLine(this.name, line);
    });
  }
}
