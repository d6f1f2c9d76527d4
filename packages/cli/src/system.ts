/**
 * The whole system on one machine with embedded defaults: cache node, engine worker, coordinator. `startSystem` is what
 * `kvtier up`, the demo, the benches and the end-to-end tests share.
 *
 * Invariant: while a system runs it holds `DATA_DIR/up.lock`; everything outside the data folder (run folder with the sockets,
 * arena file) is created and removed only under that lock, so leftovers of a killed life can be cleared without looking twice.
 */
import { rmSync } from 'node:fs';
import { type AddressInfo, createServer } from 'node:net';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import type { CacheNodeInput, CoordinatorConfig, EngineWorkerInput } from '@kvtier/config';
import { native } from '@kvtier/data-plane';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';
import { resolveModel } from '@kvtier/model';
import type { UpOptions } from './options.ts';
import { arenaBudget, arenaDir, diskBudget, openDataDir, openRunDir } from './places.ts';
import { type ServiceSpec, Supervisor } from './supervisor.ts';

export interface System {
  /** The API server, e.g. "http://127.0.0.1:8000". */
  readonly url: string;
  readonly model: { readonly name: string; readonly dir: string };
  readonly dataDir: string;
  readonly arenaBytes: number;
  readonly diskBytes: number;
  /** Process ids of the services that run now, by name: cache-node, engine-worker, coordinator. */
  pids(): Map<string, number>;
  /** SIGKILL for every service; they come back unless the system is being stopped. */
  kill(): void;
  /** Stops API server, engine and node in that order and leaves nothing but the data folder. */
  stop(): Promise<void>;
}

export interface SystemEvents {
  /** Every line of a service. */
  onLine(service: string, line: string): void;
  /** For a person: what is going on, smaller budgets than usual, deaths and restarts. */
  onEvent(message: string): void;
}

const host = '127.0.0.1';
const loader = import.meta.resolve('tsx');
const mainOf = (service: string): string =>
  fileURLToPath(new URL(`../../../services/${service}/src/main.ts`, import.meta.url));

/**
 * `abort` ends a start that is still under way.
 * @throws KvError: one line that says what, where and how to mend it; nothing is left running
 */
export async function startSystem(options: UpOptions, events: SystemEvents, abort?: AbortSignal): Promise<System> {
  const port = await freePort(options.port);
  const dataDir = openDataDir(options.dataDir);
  const lock = lockDataDir(dataDir);
  let runDir: string | undefined;
  const cleanUp = (): void => {
    if (runDir) rmSync(runDir, { recursive: true, force: true });
    removeStaleArenas(dataDir, arenaDir);
    native.unlock(lock);
  };
  try {
    runDir = openRunDir(dataDir);
    removeStaleArenas(dataDir, arenaDir);
    const model = await resolveModel(options.model, quarters(events.onEvent));
    const budgets = options.tier ? planBudgets(options, dataDir, events) : { arenaBytes: 0, diskBytes: 0 };
    const supervisor = new Supervisor({
      services: planServices(options, { port, dataDir, runDir, model, ...budgets }),
      ...events,
    });
    const onAbort = (): void => void supervisor.stop();
    abort?.throwIfAborted();
    abort?.addEventListener('abort', onAbort, { once: true });
    const ready = await supervisor.start();
    abort?.removeEventListener('abort', onAbort);
    return {
      url: String(ready.get('coordinator')!.url),
      model,
      dataDir,
      ...budgets,
      pids: () => supervisor.pids(),
      kill: () => supervisor.kill(),
      stop: async () => {
        await supervisor.stop();
        cleanUp();
      },
    };
  } catch (error) {
    cleanUp();
    throw abort?.aborted ? new KvError('CANCELLED', 'the start was interrupted') : error;
  }
}

/** Progress at 0, 25, 50 and 75 %: enough to see that it moves. */
function quarters(onEvent: (message: string) => void): (line: string, share: number) => void {
  let next = 0;
  return (line, share) => {
    if (share < next || share >= 1) return;
    next = Math.floor(share * 4) / 4 + 0.25;
    onEvent(`${line}: ${Math.floor(share * 100)} %`);
  };
}

function lockDataDir(dataDir: string): number {
  try {
    return native.lockFile(join(dataDir, 'up.lock'));
  } catch (error) {
    const failure = KvError.from(error);
    if (failure.code !== 'LOCKED') throw failure;
    throw new KvError(
      'LOCKED',
      `${dataDir}: another kvtier uses this data folder; stop it or name another with --data-dir`,
    );
  }
}

function planBudgets(options: UpOptions, dataDir: string, events: SystemEvents) {
  const arena = arenaBudget(options.arenaBytes);
  const disk = diskBudget(options.diskBytes, dataDir);
  for (const { remark } of [arena, disk]) if (remark) events.onEvent(remark);
  return { arenaBytes: arena.bytes, diskBytes: disk.bytes };
}

interface Plan {
  readonly port: number;
  readonly dataDir: string;
  readonly runDir: string;
  readonly model: { readonly name: string; readonly dir: string };
  readonly arenaBytes: number;
  readonly diskBytes: number;
}

/** The services in the order in which they are stopped: API server, engine, node. */
function planServices(options: UpOptions, plan: Plan): ServiceSpec[] {
  const { logLevel } = options;
  const nodeSocket = join(plan.runDir, 'node.sock');
  const engine = `unix:${join(plan.runDir, 'engine.sock')}`;
  const coordinator: CoordinatorConfig = { host, port: plan.port, engine, logLevel };
  const worker: EngineWorkerInput = {
    gpu: options.gpu,
    modelDir: plan.model.dir,
    servedName: plan.model.name,
    listen: engine,
    cacheNodeSocket: options.tier ? nodeSocket : null,
    ...(options.kvBytes === null ? {} : { kvBytes: options.kvBytes }),
    backend: options.backend,
    prefixCache: options.prefixCache,
    ...(options.evictionPolicy === null ? {} : { evictionPolicy: options.evictionPolicy }),
    dedupBlocks: options.dedupBlocks,
    maxPinnedBlocks: options.maxPinnedBlocks,
    ...(options.threads === null ? {} : { threads: options.threads }),
    logLevel,
  };
  const node: CacheNodeInput = {
    ...options.node,
    socketPath: nodeSocket,
    dataDir: plan.dataDir,
    arena: { bytes: plan.arenaBytes, dir: arenaDir },
    disk: plan.diskBytes === 0 ? null : { bytes: plan.diskBytes, ioBackend: 'auto' },
    logLevel,
  };
  const service = (name: string, config: object): ServiceSpec => ({
    name,
    nodeArgs: ['--import', loader, mainOf(name)],
    env: { KVTIER_CONFIG: JSON.stringify(config) },
  });
  return [
    service('coordinator', coordinator),
    service('engine-worker', worker),
    ...(options.tier ? [service('cache-node', node)] : []),
  ];
}

/**
 * The port, or for 0 a free one, which an API server that starts again keeps. A taken port is told before anything is started; the
 * coordinator still has the last word when it binds.
 */
async function freePort(port: number): Promise<number> {
  const probe = createServer();
  try {
    await new Promise<void>((resolve, reject) => {
      probe.once('error', reject);
      probe.listen(port, host, resolve);
    });
    return (probe.address() as AddressInfo).port;
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    const reason =
      code === 'EADDRINUSE'
        ? 'is taken'
        : code === 'EACCES'
          ? 'may not be used by this user'
          : `cannot be used (${message})`;
    throw new KvError(
      'CONFIG',
      `port ${port} on ${host} ${reason}; choose another: npm start -- --port ${port < 65_000 ? port + 1 : 8001}`,
    );
  } finally {
    if (probe.listening) await new Promise((resolve) => probe.close(resolve));
  }
}
