/**
 * The whole system on one machine with embedded defaults: cache nodes, engine workers, coordinator. `startSystem` is what
 * `kvtier up`, the demo, the benches and the end-to-end tests share.
 *
 * Invariant: while a system runs it holds `DATA_DIR/up.lock`; everything outside the data folder (run folder with the sockets,
 * arena file) is created and removed only under that lock, so leftovers of a killed life can be cleared without looking twice.
 */
import { randomBytes } from 'node:crypto';
import { writeFileSync } from 'node:fs';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { usableCores } from '@kvtier/config';
import { native } from '@kvtier/data-plane';
import { removeStaleArenas } from '@kvtier/data-plane/places';
import { KvError } from '@kvtier/errors';
import { resolveModel } from '@kvtier/model';
import { checkTls } from './api-options.ts';
import { FormerNodes } from './former-nodes.ts';
import { type Members, planMembers } from './members.ts';
import { freeMemory } from './memory.ts';
import type { UpOptions } from './options.ts';
import {
  arenaDir,
  givableGroup,
  isOwnFolder,
  keepTouched,
  makeRunDir,
  openDataDir,
  openRunDir,
  removeOwn,
} from './places.ts';
import { lastingPorts, probePort } from './ports.ts';
import { host, planServices, secretFile } from './services.ts';
import { type ServiceSpec, Supervisor } from './supervisor.ts';

export interface System {
  /** The API server, e.g. "http://127.0.0.1:8000". */
  readonly url: string;
  readonly model: { readonly name: string; readonly dir: string };
  readonly dataDir: string;
  /** Of all nodes together. */
  readonly arenaBytes: number;
  readonly diskBytes: number;
  readonly engines: number;
  /** Of them, those of role prefill; 0: all of them do both. */
  readonly prefillEngines: number;
  /** Cache nodes; 0: no tier. */
  readonly nodes: number;
  /** Process ids of the services that run now, by name: cache-node, engine-worker, coordinator; of several: engine-worker-0, ... */
  pids(): Map<string, number>;
  /** Resolves when something is gone for good without which nothing starts again; the system is then to be stopped. */
  readonly lost: Promise<KvError>;
  /** SIGKILL for every service; they come back unless the system is being stopped. */
  kill(): void;
  /** Stops API server, engines and nodes in that order and leaves nothing but the data folder. */
  stop(): Promise<void>;
}

export interface SystemEvents {
  /** Every line of a service. */
  onLine(service: string, line: string): void;
  /** For a person: what is going on, smaller budgets than usual, deaths and restarts. */
  onEvent(message: string): void;
}

/**
 * `abort` ends a start that is still under way.
 * @throws KvError: one line that says what, where and how to mend it; nothing is left running
 */
export async function startSystem(options: UpOptions, events: SystemEvents, abort?: AbortSignal): Promise<System> {
  checkTls(options.apiServer);
  const group = givableGroup(options.node.group ?? null);
  const port = await freePort(options.apiServer.host, options.port);
  const dataDir = openDataDir(options.dataDir);
  const lock = lockDataDir(dataDir);
  let runDir: string | undefined;
  let endTouches = (): void => {};
  let nodeDirs: readonly string[] = [dataDir];
  let former: FormerNodes | undefined;
  let supervisor: Supervisor | undefined;
  const cleanUp = (): void => {
    endTouches();
    try {
      if (runDir) removeOwn(runDir);
    } catch {
      // It is not ours any more, and stays; our files are gone with it.
    }
    for (const dir of nodeDirs) removeStaleArenas(dir, arenaDir);
    native.unlock(lock);
  };
  try {
    runDir = openRunDir(dataDir, process.env, group);
    endTouches = keepTouched(runDir);
    removeStaleArenas(dataDir, arenaDir);
    const model = await resolveModel(options.model, quarters(events.onEvent));
    // One without a tier removes nothing.
    if (options.tier) former = new FormerNodes(dataDir, options.nodes, events.onEvent);
    const members = membersOf(options, dataDir, former?.dirs ?? [], events);
    for (const node of members.nodes) removeStaleArenas(node.dataDir, arenaDir);
    nodeDirs = members.nodes.map((node) => node.dataDir);
    const isShared = members.nodes.length > 1;
    const peerPorts = isShared ? await lastingPorts(host, members.nodes.length) : [];
    const secret = isShared ? randomBytes(48).toString('base64') : undefined;
    await setImmediate(); // to look at the bundles' sources, and to begin processes, takes some tens of milliseconds each
    const services = planServices(options, { port, runDir, model, members, peerPorts });
    const place: Place = { runDir, group, secret, services };
    await setImmediate();
    writeFiles(place);
    await setImmediate();
    let onLost!: (error: KvError) => void;
    const lost = new Promise<KvError>((resolve) => {
      onLost = resolve;
    });
    const running = new Supervisor({ services, ...events, restore: () => restore(place), onLost });
    supervisor = running;
    const onAbort = (): void => void running.stop();
    abort?.throwIfAborted();
    abort?.addEventListener('abort', onAbort, { once: true });
    const ready = await running.start();
    abort?.removeEventListener('abort', onAbort);
    // Not before: a start that is refused removes nothing.
    former?.remove(arenaDir);
    return {
      url: String(ready.get('coordinator')!.url),
      model,
      dataDir,
      arenaBytes: sum(members.nodes.map((node) => node.arenaBytes)),
      diskBytes: sum(members.nodes.map((node) => node.diskBytes)),
      engines: members.engines.length,
      prefillEngines: options.prefillEngines,
      nodes: members.nodes.length,
      pids: () => running.pids(),
      lost,
      kill: () => running.kill(),
      stop: async () => {
        await running.stop();
        cleanUp();
      },
    };
  } catch (error) {
    former?.release();
    // Whatever failed: what they work with stays until they have ended.
    await supervisor?.stop();
    cleanUp();
    throw abort?.aborted ? new KvError('CANCELLED', 'the start was interrupted') : error;
  }
}

/** What services find in the run folder when they start. */
interface Place {
  readonly runDir: string;
  readonly group: number | null;
  /** Of nodes that fetch from each other. */
  readonly secret: string | undefined;
  readonly services: readonly ServiceSpec[];
}

function writeFiles({ runDir, secret, services }: Place): void {
  if (secret !== undefined) writeFileSync(secretFile(runDir), secret, { mode: 0o600 });
  for (const { file } of services) if (file) writeFileSync(file.path, file.text, { mode: 0o600 });
}

/**
 * Makes the run folder again where it has gone (the end of a user's last session takes the user's own one away), with its files. Returns who
 * had bound sockets there. @throws KvError SETUP
 */
function restore(place: Place): readonly string[] {
  try {
    if (isOwnFolder(place.runDir)) return [];
    makeRunDir(place.runDir, place.group);
    writeFiles(place);
    return place.services.filter(({ program }) => program !== 'coordinator').map(({ name }) => name);
  } catch (error) {
    const reason = (error as Error).message;
    throw new KvError('SETUP', `${place.runDir}: the sockets' folder is gone (${reason}); start kvtier again`);
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

/** What this machine has, divided among the members. @throws KvError CONFIG */
function membersOf(options: UpOptions, dataDir: string, leavingDirs: readonly string[], events: SystemEvents): Members {
  const machine = { cores: usableCores(), freeMemoryBytes: freeMemory() };
  const gpuShare = options.gpu.memoryUtilization;
  const members = planMembers({ ...options, gpuShare, dataDir, leavingDirs }, machine);
  for (const remark of members.remarks) events.onEvent(remark);
  return members;
}

const sum = (values: readonly number[]): number => values.reduce((all, each) => all + each, 0);

/**
 * The port, or for 0 a free one, which an API server that starts again keeps. A taken port is told before anything is started; the
 * coordinator still has the last word when it binds.
 */
async function freePort(host: string, port: number): Promise<number> {
  try {
    return await probePort(host, port);
  } catch (error) {
    const { code, message } = error as NodeJS.ErrnoException;
    if (code === 'EADDRNOTAVAIL') {
      const remedy = 'name one of them, or 0.0.0.0 for all';
      throw new KvError('CONFIG', `--host: ${host} is none of this machine's addresses; ${remedy}`);
    }
    const reason =
      code === 'EADDRINUSE'
        ? 'is taken'
        : code === 'EACCES'
          ? 'may not be used by this user'
          : `cannot be used (${message})`;
    const another = code === 'EACCES' && port !== 8000 ? 8000 : port < 65_000 ? port + 1 : 8001;
    throw new KvError('CONFIG', `port ${port} on ${host} ${reason}; choose another: npm start -- --port ${another}`);
  }
}
