/** The options of `kvtier up`. Unknown flags are refused with the nearest known one; every problem is one line. */
import { statSync } from 'node:fs';
import { resolve } from 'node:path';
import { parseArgs } from 'node:util';
import { cacheNodeSchema, configProblem, type EngineWorkerConfig, engineWorkerSchema } from '@kvtier/config';
import { KvError, nearest } from '@kvtier/errors';
import { cacheDir } from '@kvtier/model';
import { type ApiServerPlace, apiFlagTypes, apiHelp, apiServerPlace } from './api-options.ts';
import { parseBytes } from './bytes.ts';
import { type GpuFlags, gpuFlags } from './gpu-options.ts';
import { miswritten } from './miswritten.ts';
import { type NodeFlags, type NodeOverrides, nodeOverrides } from './node-options.ts';

export { nearest } from '@kvtier/errors';

const maxEngines = 64;
/** Of one host: each has processes, threads, an arena and a data folder of its own, and connections to all others. */
const maxNodes = 16;

export interface UpOptions {
  readonly port: number;
  /** Where the API server listens, and who is answered there. */
  readonly apiServer: ApiServerPlace;
  readonly dataDir: string;
  /** "demo", "random:25m", "random:gemma3-30m" or a folder. */
  readonly model: string;
  readonly tier: boolean;
  /** Engine workers, of all roles. */
  readonly engines: number;
  /** The first of them, which are of role prefill; the others are of role decode. 0: all of them do both. */
  readonly prefillEngines: number;
  /** Cache nodes that these share; 0 without a tier. */
  readonly nodes: number;
  /** null: chosen to fit the machine. */
  readonly arenaBytes: number | null;
  /** null: chosen to fit the machine; 0: no disk tier. */
  readonly diskBytes: number | null;
  /** null: 256 MiB on the CPU, the share `gpu.memoryUtilization` of a GPU. */
  readonly kvBytes: number | null;
  readonly backend: 'auto' | 'cpu' | 'cuda';
  /** Of backend cuda; what is not said is as the engine worker's configuration has it. */
  readonly gpu: GpuFlags;
  readonly threads: number | null;
  /** Tokens of a step at most; null: the engine worker's own. */
  readonly maxStepTokens: number | null;
  /** The structure of the engine's own prefix cache. */
  readonly prefixCache: 'blocks' | 'radix';
  /** Of its hashed blocks: which cached one goes first; null: the one freed longest ago. */
  readonly evictionPolicy: NonNullable<EngineWorkerConfig['evictionPolicy']> | null;
  /** Of its hashed blocks: no two of the same content. */
  readonly dedupBlocks: boolean;
  /** Of its hashed blocks: most that pinned prefixes hold. */
  readonly maxPinnedBlocks: number;
  /** What the tiers hold is loaded where that is faster than computing it, or always. */
  readonly loads: EngineWorkerConfig['loads'];
  /** More of the cache node's configuration (shared tiers, placement, quotas, ...), laid over what `kvtier up` makes. */
  readonly node: NodeOverrides;
  readonly jsonLog: boolean;
  /** Options and what they name are looked at, and nothing is started. */
  readonly check?: true;
  readonly logLevel: 'trace' | 'debug' | 'info' | 'warn' | 'error' | 'silent';
}

const backends = ['auto', 'cpu', 'cuda'] as const;
const prefixCaches = ['blocks', 'radix'] as const;
const evictionPolicies = engineWorkerSchema.shape.evictionPolicy.unwrap().options;
const loadsWhen = engineWorkerSchema.shape.loads.unwrap().options;
const logLevels = ['trace', 'debug', 'info', 'warn', 'error', 'silent'] as const;

export const upHelp = `kvtier up: the whole system on this machine, until Ctrl-C

  --port N             port of the OpenAI-compatible API server (8000)
${apiHelp}
  --data-dir DIR       everything persistent; one system at a time (~/.cache/kvtier)
  --model MODEL        demo, random:SIZE (for measuring, e.g. random:25m), or a Hugging Face folder (demo)
  --engines N          engine workers of this model (1); budgets are those of all together
  --prefill P          instead of --engines, with --decode: workers that compute prompts for others
  --decode D           workers that decode, and compute what no prefill worker does
  --nodes M            cache nodes that they share, engine i beside node i mod M; each fetches from the others (1; with
                       --prefill one for each worker)
  --arena-bytes SIZE   shared-memory tier (1GiB, less where /dev/shm or memory is short)
  --disk-bytes SIZE    disk tier, a hard cap; 0: none (8GiB, less where the disk is smaller)
  --kv-bytes SIZE      the engine's own KV block pool (256MiB; on a GPU: what --gpu-memory-utilization leaves)
  --backend NAME       auto, cpu or cuda; auto: a GPU where there is one (auto)
  --gpu N              which GPU (0)
  --gpu-memory-utilization SHARE
                       of the GPU's memory, for weights, steps and KV blocks (0.9)
  --dtype TYPE         bf16, f16 or f32: weights and activations on a GPU (bf16)
  --kv-dtype TYPE      e4m3: keys and values as FP8, half the bytes (as --dtype)
  --equal-bits         a GPU's matrix products by rules, not by a stopwatch: the same bits in every process and batch
  --max-step-tokens N  tokens that a step computes at most: more is faster for long prompts on a GPU, and holds up
                       decodes beside them for longer (512; on a GPU what was measured there)
  --threads N          compute threads of the engine (all cores)
  --prefix-cache KIND  the engine's own cache: blocks (hashed) or radix (a token tree) (blocks)
  --eviction POLICY    which cached block goes first: ${evictionPolicies.join(', ')} (freed longest ago)
  --dedup              a block that fills up with what is cached already gives way to the cached one
  --pinned-blocks N    most blocks that pinned prefixes hold (0; docs/operating.md, "The engine's own blocks")
  --loads WHEN         planned: what is held is loaded where that is faster than computing it; always (planned)
  --redis URL          a Redis tier that nodes share: redis://, rediss:// or unix:; with --redis-bytes
  --redis-bytes SIZE   budget of all nodes that share it (1GiB)
  --s3 URL             an S3 tier that nodes share, as http(s)://HOST:PORT/BUCKET; keys: the AWS variables; with --s3-bytes
  --s3-bytes SIZE      budget of all nodes that share it (8GiB)
  --group GROUP        who is in it, by name or number, may attach to the nodes, too: engines of other users
  --node-config FILE   more of the cache node's configuration, JSON (docs/cache-node.md)
  --no-tier            engine and API server only, to compare
  --check              looks at the options and the files that they name, and starts nothing: 0, or what is wrong
  --json-log           log lines of the services as JSON, from level info on
  --log-level LEVEL    ${logLevels.join(', ')} (warn; info with --json-log)
  --help               this text
`;

const flags = {
  port: { type: 'string' },
  ...apiFlagTypes,
  'data-dir': { type: 'string' },
  model: { type: 'string' },
  'no-tier': { type: 'boolean' },
  engines: { type: 'string' },
  prefill: { type: 'string' },
  decode: { type: 'string' },
  nodes: { type: 'string' },
  'arena-bytes': { type: 'string' },
  'disk-bytes': { type: 'string' },
  'kv-bytes': { type: 'string' },
  backend: { type: 'string' },
  gpu: { type: 'string' },
  'gpu-memory-utilization': { type: 'string' },
  dtype: { type: 'string' },
  'kv-dtype': { type: 'string' },
  'equal-bits': { type: 'boolean' },
  'max-step-tokens': { type: 'string' },
  threads: { type: 'string' },
  'prefix-cache': { type: 'string' },
  eviction: { type: 'string' },
  dedup: { type: 'boolean' },
  'pinned-blocks': { type: 'string' },
  loads: { type: 'string' },
  redis: { type: 'string' },
  'redis-bytes': { type: 'string' },
  s3: { type: 'string' },
  's3-bytes': { type: 'string' },
  group: { type: 'string' },
  'node-config': { type: 'string' },
  check: { type: 'boolean' },
  'json-log': { type: 'boolean' },
  'log-level': { type: 'string' },
  help: { type: 'boolean', short: 'h' },
} as const;

/** null: help was asked for. @throws KvError CONFIG */
export function parseUp(args: readonly string[]): UpOptions | null {
  const { values, positionals } = parseFlags(args, flags, 'kvtier up --help');
  if (values.help) return null;
  if (positionals.length > 0) {
    throw miswritten(`kvtier up: "${positionals[0]}" is not an option; see kvtier up --help`);
  }
  const jsonLog = values['json-log'] === true;
  const logLevel = oneOf(logLevels, values['log-level'] ?? (jsonLog ? 'info' : 'warn'), '--log-level');
  const prefixCache = oneOf(prefixCaches, values['prefix-cache'] ?? 'blocks', '--prefix-cache');
  const backend = oneOf(backends, values.backend ?? 'auto', '--backend');
  const evictionPolicy = values.eviction === undefined ? null : oneOf(evictionPolicies, values.eviction, '--eviction');
  const loads = oneOf(loadsWhen, values.loads ?? 'planned', '--loads');
  const pinned = values['pinned-blocks'];
  const stepTokens = values['max-step-tokens'];
  for (const name of ['eviction', 'dedup', 'pinned-blocks'] as const) {
    if (prefixCache === 'radix' && values[name] !== undefined)
      throw miswritten(`--${name}: an option of hashed blocks; use --prefix-cache blocks or leave it out`);
  }
  const tier = values['no-tier'] !== true;
  const { engines, prefillEngines } = engineCounts(values, tier);
  const size = (name: 'arena-bytes' | 'disk-bytes' | 'kv-bytes', minBytes: number): number | null =>
    values[name] === undefined ? null : parseBytes(values[name], `--${name}`, minBytes);
  return {
    port: values.port === undefined ? 8000 : whole(values.port, '--port', 0, 65_535),
    apiServer: apiServerPlace(values),
    dataDir: resolve(dataDirOf(values['data-dir'])),
    model: values.model ?? 'demo',
    tier,
    engines,
    prefillEngines,
    nodes: tier ? nodeCount(values.nodes, engines, prefillEngines > 0) : withoutNodes(values.nodes),
    arenaBytes: size('arena-bytes', 2 ** 20),
    diskBytes: values['disk-bytes'] === '0' ? 0 : size('disk-bytes', 8 * 2 ** 20),
    kvBytes: size('kv-bytes', 2 ** 20),
    backend,
    gpu: gpuFlags(values),
    maxStepTokens: stepTokens === undefined ? null : whole(stepTokens, '--max-step-tokens', 16, 65_536),
    threads: values.threads === undefined ? null : whole(values.threads, '--threads', 1, 1024),
    prefixCache,
    evictionPolicy,
    dedupBlocks: values.dedup === true,
    maxPinnedBlocks: pinned === undefined ? 0 : whole(pinned, '--pinned-blocks', 0, 2 ** 31),
    loads,
    node: checkedOverrides(values),
    ...(values.check === true && { check: true as const }),
    jsonLog,
    logLevel,
  };
}

function oneOf<T extends string>(names: readonly T[], name: string, option: string): T {
  const known = names.find((each) => each === name);
  if (known === undefined) throw miswritten(`${option}: "${name}" is not one of ${names.join(', ')}`);
  return known;
}

function engineCounts(
  values: { readonly engines?: string; readonly prefill?: string; readonly decode?: string },
  tier: boolean,
): Pick<UpOptions, 'engines' | 'prefillEngines'> {
  const { engines, prefill, decode } = values;
  if (prefill === undefined && decode === undefined)
    return { engines: engines === undefined ? 1 : whole(engines, '--engines', 1, maxEngines), prefillEngines: 0 };
  const given = prefill === undefined ? '--decode' : '--prefill';
  if (engines !== undefined)
    throw miswritten(`${given}: the workers are counted by --prefill and --decode; drop --engines`);
  if (prefill === undefined || decode === undefined) {
    const other = prefill === undefined ? '--prefill' : '--decode';
    throw miswritten(`${given}: prefill and decode apart need both; say ${other} as well`);
  }
  if (!tier) throw miswritten(`${given}: blocks are handed over by cache nodes; drop --no-tier`);
  const prefillEngines = whole(prefill, '--prefill', 1, maxEngines - 1);
  return { engines: prefillEngines + whole(decode, '--decode', 1, maxEngines - prefillEngines), prefillEngines };
}

/** Apart, prefill and decode stand for hosts: each has a node of its own, as far as one host has so many. */
function nodeCount(text: string | undefined, engines: number, apart: boolean): number {
  if (text === undefined) return apart ? Math.min(engines, maxNodes) : 1;
  const nodes = whole(text, '--nodes', 1, maxNodes);
  if (nodes <= engines) return nodes;
  const remedy = `ask for ${engines} or fewer, or for more engines`;
  throw miswritten(`--nodes: ${nodes} nodes are more than engines (${engines}); ${remedy}`);
}

/** What the node would refuse is told before anything is made; what depends on the size of its arena, when that is known (services.ts). */
function checkedOverrides(values: NodeFlags & { readonly 'disk-bytes'?: string }): NodeOverrides {
  const node = nodeOverrides(values);
  const disk = values['disk-bytes'] === '0' ? null : { bytes: 2 ** 30 };
  const own = { socketPath: '/', dataDir: '/', arena: { bytes: Number.MAX_SAFE_INTEGER }, disk };
  const problem = configProblem(cacheNodeSchema, { ...own, ...node });
  if (problem === undefined) return node;
  const path = problem.path.join('.');
  const option = (['redis', 's3', 'group'] as const).find(
    (name) => name === problem.path[0] && values[name] !== undefined,
  );
  const source = option === undefined ? `--node-config: ${values['node-config']}` : `--${option}`;
  throw miswritten(`${source}: ${path === '' ? '' : `${path}: `}${problem.what}`);
}

/** An empty name is that of a variable that is not set, not this folder. */
function dataDirOf(dir = cacheDir()): string {
  if (dir === '') throw miswritten('--data-dir: names no folder; name one, or leave it out');
  if (!isFile(dir)) return dir;
  throw new KvError('CONFIG', `--data-dir: ${dir} is a file; name a folder`);
}

function isFile(path: string): boolean {
  try {
    return !statSync(path).isDirectory();
  } catch {
    return false; // what else there is about it is told when it is opened
  }
}

function withoutNodes(text: string | undefined): 0 {
  if (text === undefined) return 0;
  throw miswritten('--nodes: there is no cache node with --no-tier; drop one');
}

function whole(text: string, option: string, min: number, max: number): number {
  const value = /^\d+$/.test(text) ? Number(text) : Number.NaN;
  if (value >= min && value <= max) return value;
  throw miswritten(`${option}: "${text}" is not a whole number from ${min} to ${max}`);
}

type Flags = NonNullable<Parameters<typeof parseArgs>[0]>['options'];

/** `parseArgs` with errors for people: one line, and the nearest known flag. */
export function parseFlags<const F extends NonNullable<Flags>>(args: readonly string[], options: F, help: string) {
  for (const arg of args) {
    if (arg === '--') break;
    const name = /^--([^=]+)/.exec(arg)?.[1];
    if (name === undefined || Object.hasOwn(options, name)) continue;
    const near = nearest(name, Object.keys(options));
    throw miswritten(`--${name}: unknown option; ${near ? `did you mean --${near}?` : `see ${help}`}`);
  }
  try {
    return parseArgs({ args: [...args], options, allowPositionals: true, strict: true });
  } catch (error) {
    const unknown = /^Unknown option '(-[^']*)'/.exec((error as Error).message)?.[1];
    if (unknown !== undefined) throw miswritten(`${unknown}: unknown option; see ${help}`);
    throw miswritten(`${(error as Error).message.split('\n')[0]!.replace(/\.$/, '')}; see ${help}`);
  }
}
