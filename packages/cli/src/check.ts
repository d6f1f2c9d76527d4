/**
 * `kvtier up --check`: what a start would find, looked at without one. Options, budgets and the model are looked at here, what the services are
 * configured with by their own programs (`--check`). Invariant: nothing is bound, made or removed, but for a file of our own in the folder
 * for temporary ones, where a configuration is too long for a variable; a system that runs now does not matter.
 */
import { execFile } from 'node:child_process';
import { mkdtempSync, rmSync, writeFileSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { setImmediate } from 'node:timers/promises';
import { usableCores } from '@kvtier/config';
import { ownArenaBytes } from '@kvtier/data-plane/places';
import { configExitCode, exitCodeOf, KvError } from '@kvtier/errors';
import { checkModel } from '@kvtier/model';
import { checkTls } from './api-options.ts';
import { planMembers } from './members.ts';
import { freeMemory } from './memory.ts';
import type { UpOptions } from './options.ts';
import { arenaDir, checkDataDir, existing, freeBytesOf, givableGroup } from './places.ts';
import { configText, planServices } from './services.ts';
import type { ServiceSpec } from './supervisor.ts';

/** Of a service that looks at its configuration: on a busy machine seconds. */
const checkMs = 60_000;
/** Sockets of a start lie in a folder that it makes; this one is never there. */
const runDir = '/tmp/kvtier-check';

interface Checked {
  /** What is wrong; none: a start would begin. */
  readonly lines: readonly string[];
  /** That of a start. */
  readonly code: number;
}

interface Problem {
  readonly line: string;
  /** It was written so, and not found. */
  readonly isFinal: boolean;
}

export async function checkSystem(options: UpOptions): Promise<Checked> {
  const problems: Problem[] = [];
  const look = async <T>(what: () => T | Promise<T>): Promise<T | undefined> => {
    try {
      return await what();
    } catch (error) {
      const { message, isFinal } = KvError.from(error, 'SETUP');
      problems.push({ line: `kvtier: ${message}`, isFinal });
      return undefined;
    }
  };
  await look(() => checkTls(options.apiServer));
  const isTlsSound = problems.length === 0;
  await look(() => givableGroup(options.node.group ?? null));
  const isFolderSound = await look(() => checkDataDir(options.dataDir));
  const model = await look(() => checkModel(options.model));
  await setImmediate(); // each of what follows may take some tens of milliseconds
  const services = await look(() => planned(options, model ?? { name: '', dir: '' }));
  // The coordinator would say the same of TLS again.
  const asked = (services ?? []).filter(({ program }) => program !== 'coordinator' || isTlsSound);
  const saying: Promise<Problem[]>[] = [];
  for (const service of asked) {
    await setImmediate();
    saying.push(said(service));
  }
  const theirs = (await Promise.all(saying)).flat();
  // And the node the same of the data folder.
  problems.push(...theirs.filter(({ line }) => isFolderSound === true || !/^\S+: \w+: dataDir: /.test(line)));
  return { lines: problems.map(({ line }) => line), code: problems.length === 0 ? 0 : exitCodeOf(problems) };
}

/** One of each kind: several are configured alike. Of engines there is nothing to read but the model. */
function planned(options: UpOptions, model: { readonly name: string; readonly dir: string }): readonly ServiceSpec[] {
  const { dataDir } = options;
  const nodeDirs = Array.from({ length: options.nodes }, (_, i) => (i === 0 ? dataDir : join(dataDir, `node-${i}`)));
  const ownBytes = nodeDirs.reduce((bytes, dir) => bytes + ownArenaBytes(dir, arenaDir), 0);
  const machine = { cores: usableCores(), freeMemoryBytes: freeMemory() };
  const looking = { ownArenaBytes: ownBytes, freeDiskBytes: freeBytesOf(existing(dataDir)) };
  const members = planMembers({ ...options, gpuShare: options.gpu.memoryUtilization, looking }, machine);
  const peerPorts = members.nodes.map((_, i) => i + 1);
  const all = planServices(options, { port: options.port, runDir, model, members, peerPorts });
  return (['coordinator', 'cache-node'] as const).flatMap((kind) => all.find(({ program }) => program === kind) ?? []);
}

async function said(service: ServiceSpec): Promise<Problem[]> {
  const config = JSON.parse(configText(service)) as { peers?: object };
  delete config.peers; // of several nodes, whose secret is made by a start
  const text = JSON.stringify(config);
  const { name, nodeArgs, env, file } = service;
  const unseen = `kvtier: ${name}: its configuration could not be looked at`;
  let folder: string | undefined;
  try {
    if (file === undefined) return await answered(nodeArgs, { ...env, KVTIER_CONFIG: text }, unseen);
    folder = mkdtempSync(join(tmpdir(), 'kvtier-check-'));
    const path = join(folder, 'config.json');
    writeFileSync(path, text, { mode: 0o600 });
    const args = nodeArgs.map((arg) => (arg === file.path ? path : arg));
    return await answered(args, env, unseen);
  } catch (error) {
    return [{ line: `${unseen} (${(error as Error).message}); ask its own program, by --check`, isFinal: false }];
  } finally {
    if (folder !== undefined) rmSync(folder, { recursive: true, force: true });
  }
}

/** What a service's program says of its configuration. */
function answered(nodeArgs: readonly string[], env: ServiceSpec['env'], unseen: string): Promise<Problem[]> {
  const place = { env: { ...process.env, ...env }, timeout: checkMs };
  return new Promise((resolve) => {
    execFile(process.execPath, [...nodeArgs, '--check'], place, (error, _, text) => {
      const lines = text.split('\n').filter((line) => line !== '');
      const all = error === null || lines.length > 0 ? lines : [unseen];
      resolve(all.map((line) => ({ line, isFinal: error?.code === configExitCode })));
    });
  });
}
