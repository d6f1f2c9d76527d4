/** The services of a system on one machine with their configuration, from its members: API server, engines, nodes. Pure. */
import { join } from 'node:path';
import {
  type CacheNodeInput,
  type CoordinatorInput,
  cacheNodeSchema,
  configProblem,
  type EngineWorkerInput,
  type EventSource,
} from '@kvtier/config';
import { KvError } from '@kvtier/errors';
import type { EngineMember, Members, NodeMember } from './members.ts';
import { miswritten } from './miswritten.ts';
import type { UpOptions } from './options.ts';
import { arenaDir } from './places.ts';
import { type Program, started } from './programs.ts';
import type { ServiceSpec } from './supervisor.ts';

/** Where this system's members find each other. */
export const host = '127.0.0.1';

export interface Plan {
  readonly port: number;
  readonly runDir: string;
  readonly model: { readonly name: string; readonly dir: string };
  readonly members: Members;
  /** One for each node where there are several: where the others fetch from it. */
  readonly peerPorts: readonly number[];
}

/** A generated secret, which only this system's nodes know. */
export const secretFile = (runDir: string): string => join(runDir, 'peer-secret');

/** In the order in which they are stopped: API server, engines, nodes. @throws KvError CONFIG */
export function planServices(options: UpOptions, plan: Plan): ServiceSpec[] {
  const { engines, nodes } = plan.members;
  const several = engines.length > 1;
  if (several) refuseOwn(options, nodes.length);
  const socket = (kind: string, i: number): string => join(plan.runDir, `${kind}${several ? `-${i}` : ''}.sock`);
  const engineAddress = (i: number): string => `unix:${socket('engine', i)}`;
  const nodeSocket = (i: number): string => socket('node', i);
  const events = (kind: string, i: number): EventSource => ({
    endpoint: `ipc://${join(plan.runDir, `${kind}-${i}.events`)}`,
    replayEndpoint: `ipc://${join(plan.runDir, `${kind}-${i}.replay`)}`,
    topic: '',
  });
  const { logLevel } = options;
  const service = serviceMaker(plan.runDir);
  const members: CoordinatorInput['discovery'] = {
    kind: 'static',
    workers: engines.map(({ name, role, node }, i) => ({
      name,
      role,
      address: engineAddress(i),
      node: node === undefined ? null : nodes[node]!.name,
      events: events('engine', i),
    })),
    nodes: nodes.map(({ name }, i) => ({
      name,
      peer: nodes.length > 1 ? { host, port: plan.peerPorts[i]! } : null,
      events: events('node', i),
    })),
  };
  const coordinator: CoordinatorInput = {
    ...options.apiServer,
    port: plan.port,
    ...(several ? { discovery: members } : { engine: engineAddress(0) }),
    logLevel,
  };
  return [
    service('coordinator', 'coordinator', 0, coordinator),
    ...engines.map((member, i) =>
      service(member.name, 'engine-worker', 1, {
        ...engineConfig(options, plan, member),
        listen: engineAddress(i),
        cacheNodeSocket: member.node === undefined ? null : nodeSocket(member.node),
        ...(several && { kvEvents: events('engine', i) }),
      }),
    ),
    ...nodes.map((member, i) =>
      service(
        member.name,
        'cache-node',
        2,
        checked(
          {
            ...options.node,
            ...nodeConfig(options, member),
            socketPath: nodeSocket(i),
            ...(several && { kvEvents: events('node', i) }),
            ...(nodes.length > 1 && { peers: peersOf(plan, i) }),
          },
          options.arenaBytes !== null,
        ),
      ),
    ),
  ];
}

type Service = (
  name: string,
  kind: Program,
  stage: number,
  config: CoordinatorInput | EngineWorkerInput | CacheNodeInput,
) => ServiceSpec;

/** Linux takes 128 KiB for one variable, its name included. */
const maxVariableBytes = 100 << 10;

/** What `service` is configured with, wherever that is written. */
export const configText = ({ env, file }: ServiceSpec): string => file?.text ?? env.KVTIER_CONFIG!;

/** How a program is started is looked up once: hundreds of files are looked at for it. */
function serviceMaker(runDir: string): Service {
  const found = new Map<Program, readonly string[]>();
  return (name, kind, stage, config) => {
    const nodeArgs = found.get(kind) ?? started(kind);
    found.set(kind, nodeArgs);
    const text = JSON.stringify(config);
    const spec = { name, program: kind, stage };
    if (Buffer.byteLength(text) <= maxVariableBytes) return { ...spec, nodeArgs, env: { KVTIER_CONFIG: text } };
    const path = join(runDir, `${name}.json`);
    return { ...spec, nodeArgs: [...nodeArgs, '--config', path], env: {}, file: { path, text } };
  };
}

type EngineConfig = Omit<EngineWorkerInput, 'listen' | 'cacheNodeSocket'>;

function engineConfig(options: UpOptions, plan: Plan, member: EngineMember): EngineConfig {
  return {
    gpu: { ...options.gpu, ...(member.gpuShare !== undefined && { memoryUtilization: member.gpuShare }) },
    modelDir: plan.model.dir,
    servedName: plan.model.name,
    ...(member.kvBytes !== undefined && { kvBytes: member.kvBytes }),
    backend: options.backend,
    prefixCache: options.prefixCache,
    loads: options.loads,
    ...(options.evictionPolicy !== null && { evictionPolicy: options.evictionPolicy }),
    dedupBlocks: options.dedupBlocks,
    maxPinnedBlocks: options.maxPinnedBlocks,
    ...(member.threads !== undefined && { threads: member.threads }),
    ...(options.maxStepTokens !== null && { maxStepTokens: options.maxStepTokens }),
    logLevel: options.logLevel,
  };
}

const nodeConfig = (options: UpOptions, member: NodeMember): Omit<CacheNodeInput, 'socketPath'> => ({
  dataDir: member.dataDir,
  arena: { bytes: member.arenaBytes, dir: arenaDir },
  disk: member.diskBytes === 0 ? null : { bytes: member.diskBytes, ioBackend: 'auto' },
  logLevel: options.logLevel,
});

/**
 * The node would refuse the same, by the name of a variable that nobody has written. `isFinal`: whatever the machine has free. @throws KvError CONFIG
 */
function checked(config: CacheNodeInput, isFinal: boolean): CacheNodeInput {
  const problem = configProblem(cacheNodeSchema, config);
  if (problem === undefined) return config;
  throw new KvError('CONFIG', `--node-config: ${problem.path.join('.')}: ${problem.what}`, { isFinal });
}

/** Every other node of this system. */
const peersOf = ({ peerPorts, runDir }: Plan, own: number): NonNullable<CacheNodeInput['peers']> => ({
  listen: { host, port: peerPorts[own]! },
  peers: peerPorts.flatMap((port, i) => (i === own ? [] : [{ host, port }])),
  security: { encryption: 'none', secretFile: secretFile(runDir) },
});

/** What several nodes cannot all have. @throws KvError CONFIG */
function refuseOwn({ node }: UpOptions, nodeCount: number): void {
  for (const key of ['peers', 'kvEvents'] as const) {
    if (node[key] === undefined || node[key] === null) continue;
    throw miswritten(`--node-config: with several engines kvtier up sets "${key}" itself; remove it`);
  }
  if (nodeCount < 2) return;
  for (const key of ['membership', 'operations'] as const) {
    if (node[key] == null) continue;
    const why = `"${key}" is of one node, and there would be ${nodeCount}`;
    throw miswritten(`--node-config: ${why}; remove it, or ask for --nodes 1`);
  }
}
