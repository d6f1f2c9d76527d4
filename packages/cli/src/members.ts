/**
 * The members of a system on one machine: N engine workers over M cache nodes, engine i beside node i mod M; where prefill and decode are
 * apart, the prefill workers are the first of them. What one machine has is
 * divided among them, so that many take no more of it than one. Pure but for folders.
 *
 * Node 0 has the data folder itself, so that what one node had stored is there for the first of many; node i has DATA_DIR/node-i.
 */
import { join } from 'node:path';
import { KvError } from '@kvtier/errors';
import { formatBytes } from './bytes.ts';
import { miswritten } from './miswritten.ts';
import { arenaBudget, arenaDir, diskBudget, freeBytesOf, minArenaBytes, minDiskBytes, openDataDir } from './places.ts';

const defaultKvBytes = 256 * 2 ** 20;
const minKvBytes = 2 ** 20;
const MiB = 2 ** 20;

/** both: it computes prompts and decodes. */
export type EngineRole = 'both' | 'prefill' | 'decode';

export interface NodeMember {
  /** "cache-node", or "cache-node-0" among several members. */
  readonly name: string;
  readonly dataDir: string;
  readonly arenaBytes: number;
  /** 0: no disk tier. */
  readonly diskBytes: number;
}

export interface EngineMember {
  readonly name: string;
  readonly role: EngineRole;
  /** Of `nodes`, the one beside it; undefined: there are none. */
  readonly node: number | undefined;
  /** undefined: what the engine worker takes by itself. */
  readonly kvBytes: number | undefined;
  /** Compute threads; undefined: all cores. */
  readonly threads: number | undefined;
  /** Of the GPU's memory; undefined: what the engine worker takes by itself. */
  readonly gpuShare: number | undefined;
}

export interface Members {
  readonly engines: readonly EngineMember[];
  readonly nodes: readonly NodeMember[];
  /** Smaller budgets than usual, for a person. */
  readonly remarks: readonly string[];
}

export interface MemberOptions {
  readonly engines: number;
  /** The first of them are of role prefill, the others of role decode; 0: all are both. */
  readonly prefillEngines: number;
  /** 0: no tier. */
  readonly nodes: number;
  /** Of all together; null: chosen to fit the machine. */
  readonly arenaBytes: number | null;
  readonly diskBytes: number | null;
  readonly kvBytes: number | null;
  /** Of each engine; null: the cores divided. */
  readonly threads: number | null;
  readonly gpuShare: number | undefined;
  readonly dataDir: string;
  /** Data folders of former nodes: what they have stored goes once these have started; absent: none. */
  readonly leavingDirs?: readonly string[];
  /** No folder is made, and the data folder need not be there; of shared memory, and of memory, counts as free what arenas of a running system have. */
  readonly looking?: { readonly ownArenaBytes: number; readonly freeDiskBytes: number };
}

/** What this machine has. */
export interface Machine {
  readonly cores: number;
  readonly freeMemoryBytes: number;
}

const defaultGpuShare = 0.9;

/** Creates the folders of nodes. @throws KvError CONFIG */
export function planMembers(options: MemberOptions, machine: Machine): Members {
  const remarks: string[] = [];
  return { nodes: planNodes(options, machine, remarks), engines: planEngines(options, machine, remarks), remarks };
}

function planNodes(
  { nodes: count, engines, dataDir, ...options }: MemberOptions,
  machine: Machine,
  remarks: string[],
): NodeMember[] {
  if (count === 0) return [];
  const folderOf = options.looking === undefined ? openDataDir : (dir: string): string => dir;
  const dataDirs = Array.from({ length: count }, (_, i) => (i === 0 ? dataDir : folderOf(join(dataDir, `node-${i}`))));
  const ownBytes = options.looking?.ownArenaBytes ?? 0;
  const arena = arenaBudget(options.arenaBytes, freeBytesOf(arenaDir) + ownBytes, machine.freeMemoryBytes + ownBytes);
  const disk = diskBudget(options.diskBytes, dataDir, dataDirs, options.leavingDirs, options.looking?.freeDiskBytes);
  for (const { remark } of [arena, disk]) if (remark) remarks.push(remark);
  const each = (bytes: number, least: number, option: string, asked: number | null): number => {
    if (bytes === 0 || count === 1) return bytes;
    const share = Math.floor(bytes / count / MiB) * MiB;
    if (share >= least) return share;
    const needed = formatBytes(least * count);
    throw new KvError(
      'CONFIG',
      `${option}: ${formatBytes(bytes)} are too little for ${count} nodes; give them ${needed}`,
      { isFinal: asked !== null }, // else by what the machine has free
    );
  };
  const arenaBytes = each(arena.bytes, minArenaBytes, '--arena-bytes', options.arenaBytes);
  const diskBytes = each(disk.bytes, minDiskBytes, '--disk-bytes', options.diskBytes);
  const name = (i: number): string => memberName('cache-node', i, engines);
  return dataDirs.map((own, i) => ({ name: name(i), dataDir: own, arenaBytes, diskBytes }));
}

function planEngines(options: MemberOptions, machine: Machine, remarks: string[]): EngineMember[] {
  const { engines: count, prefillEngines, nodes } = options;
  const role = (i: number): EngineRole => (prefillEngines === 0 ? 'both' : i < prefillEngines ? 'prefill' : 'decode');
  const gpuShare = count === 1 ? options.gpuShare : (options.gpuShare ?? defaultGpuShare) / count;
  const threads = options.threads ?? (count === 1 ? undefined : Math.max(1, Math.floor(machine.cores / count)));
  const kvBytes = kvBytesEach(options, machine, remarks);
  return Array.from({ length: count }, (_, i) => ({
    name:
      prefillEngines === 0
        ? memberName('engine-worker', i, count)
        : `${role(i)}-${i < prefillEngines ? i : i - prefillEngines}`,
    role: role(i),
    node: nodes === 0 ? undefined : i % nodes,
    kvBytes,
    threads,
    gpuShare,
  }));
}

function kvBytesEach({ engines, kvBytes }: MemberOptions, machine: Machine, remarks: string[]): number | undefined {
  if (engines === 1) return kvBytes ?? undefined;
  if (kvBytes !== null) {
    const share = Math.floor(kvBytes / engines);
    if (share >= minKvBytes) return share;
    const needed = formatBytes(minKvBytes * engines);
    throw miswritten(`--kv-bytes: ${formatBytes(kvBytes)} are too little for ${engines} engines; give them ${needed}`);
  }
  // Half of the free memory: the rest is for weights, which every engine has for itself.
  const fits = Math.floor(machine.freeMemoryBytes / 2 / engines / MiB) * MiB;
  if (fits >= defaultKvBytes) return undefined;
  const share = Math.max(minKvBytes, fits);
  remarks.push(
    `KV blocks of ${formatBytes(share)} for each engine: only ${formatBytes(machine.freeMemoryBytes)} of memory free`,
  );
  return share;
}

/** Where there is one engine, and so one node, they have no number. */
const memberName = (service: string, i: number, engines: number): string =>
  engines === 1 ? service : `${service}-${i}`;
