/**
 * The Redis tier against the server's own rate, in the same run: SET and GET of 2 MiB blocks through `RedisTier` (reserved,
 * written in parts, listed; read in parts, verified), beside the larger of redis-benchmark and a plain socket client, each with as
 * many connections. While the tier works, another process asks for a small value; its median stands beside that on an idle server.
 * Rounds are paired: each side takes its turn in each round, and the median of the rounds' ratios counts, because a busy host changes
 * by more from minute to minute than the sides differ. A few turns before do not count. Client, server and prober share this
 * machine's cores; CPU seconds per GB are printed for both.
 */
import { execFile, spawn } from 'node:child_process';
import { createHash } from 'node:crypto';
import { readFileSync, unlinkSync } from 'node:fs';
import { connect, type Socket } from 'node:net';
import { promisify } from 'node:util';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { encodeHeader, type HashKey, headerBytes, namespaceFromDigest } from '@kvtier/identity';
import { ArenaMemory, ArenaTier, type SlotBlock } from '@kvtier/tiers';
import { defaultRedisSettings, RedisTier } from '@kvtier/tiers/redis';
import { RedisServer } from '../../infra/redis/servers.ts';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, median, rate, type Suite, time } from '../figures.ts';

const rounds = 9;
/** Long enough that what a turn begins with (memory of the other side's sizes, sockets that were idle) is a small part of it. */
const turnMs = 1500;
const payloadBytes = 2 << 20;
const slotCount = 32;
/** More than a turn can write. */
const namesOfATurn = 4000;
/** Values of the plain clients: as much of the server’s memory as the tier’s budget. */
const plainKeys = 960;
/** As the store writes down (packages/store/placement/src/limits.ts): batches of 16 MiB, four at a time. */
const batchBlocks = 8;
const batchesInFlight = 4;
const arenaBytes = 96 << 20;
const budgetBytes = 2 * 1024 ** 3;
const namespace = namespaceFromDigest(createHash('sha256').update('bench redis').digest());
const run = promisify(execFile);
const { connections } = defaultRedisSettings;

/** Of a process, so far: user and system, in the kernel's ticks of 10 ms. */
function cpuSecondsOf(pid: number): number {
  const fields = readFileSync(`/proc/${pid}/stat`, 'utf8').split(') ')[1]!.split(' ');
  return (Number(fields[11]) + Number(fields[12])) / 100;
}

/** GB/s of redis-benchmark with values of a block's size. */
async function redisBenchmark(port: number, kind: 'set' | 'get'): Promise<number> {
  const args = [
    '-p',
    String(port),
    '-c',
    String(connections),
    '-d',
    String(payloadBytes),
    '-n',
    '400',
    '-r',
    '64',
    '--csv',
  ];
  const { stdout } = await run('redis-benchmark', [...args, '-t', kind]);
  const perSecond = Number(stdout.trim().split('\n').at(-1)!.split(',')[1]!.replaceAll('"', ''));
  return (perSecond * payloadBytes) / 1e9;
}

/**
 * GB/s of a client that does nothing but write values out of preallocated memory and read them into it: as much memory, and about as
 * many keys, as the tier has, so that neither side lives in a cache of the processor.
 */
async function plainSocket(port: number, kind: 'set' | 'get', memory: Buffer): Promise<number> {
  let values = 0;
  const endMs = performance.now() + turnMs;
  const worker = (number: number): Promise<void> =>
    new Promise((resolve, reject) => {
      const head = Buffer.byteLength(`$${payloadBytes}\r\n`);
      const scratch = Buffer.alloc(head);
      const replyBytes = kind === 'set' ? 5 : head + payloadBytes + 2;
      let got = 0;
      let turn = number;
      let place = memory;
      const send = (socket: Socket): void => {
        got = 0;
        turn += connections;
        const at = (turn % slotCount) * payloadBytes;
        place = memory.subarray(at, at + payloadBytes);
        const key = `plain:${turn % plainKeys}`;
        if (kind === 'get') socket.write(`*2\r\n$3\r\nGET\r\n$${key.length}\r\n${key}\r\n`);
        else {
          socket.cork();
          socket.write(`*3\r\n$3\r\nSET\r\n$${key.length}\r\n${key}\r\n$${payloadBytes}\r\n`);
          socket.write(place);
          socket.write('\r\n');
          socket.uncork();
        }
      };
      const buffer = (): Buffer =>
        got < head ? scratch.subarray(got) : got < head + payloadBytes ? place.subarray(got - head) : scratch;
      const callback = (count: number): boolean => {
        got += count;
        if (got < replyBytes) return true;
        values++;
        // Every key is there before any is read, however slow the machine.
        if (performance.now() < endMs || (kind === 'set' && turn < plainKeys)) send(socket);
        else {
          socket.destroy();
          resolve();
        }
        return true;
      };
      const onread = { buffer: buffer as never, callback };
      const socket: Socket = connect({ port, host: '127.0.0.1', noDelay: true, onread });
      socket.once('connect', () => send(socket));
      socket.once('error', reject);
    });
  const startMs = performance.now();
  await Promise.all(Array.from({ length: connections }, (_, number) => worker(number)));
  return (values * payloadBytes) / (performance.now() - startMs) / 1e6;
}

/** Median microseconds of a small GET by another process, until `work` ends (or for a turn). */
async function probe(port: number, work?: () => Promise<void>): Promise<number> {
  const program = `
    const socket = require('node:net').connect(${port}, '127.0.0.1'), times = []; let since = 0;
    socket.setNoDelay(true); socket.write('SET small x\\r\\n');
    const end = () => { times.sort((a, b) => a - b); process.stdout.write(String(times[times.length >> 1]), () => process.exit()); };
    process.stdin.on('end', end).resume();
    socket.on('data', () => {
      const now = performance.now(); if (since) times.push((now - since) * 1000);
      since = performance.now(); socket.write('GET small\\r\\n');
    });
    socket.on('connect', () => process.stderr.write('ready'));`;
  const child = spawn(process.execPath, ['-e', program], { stdio: ['pipe', 'pipe', 'pipe'] });
  let text = '';
  child.stdout.on('data', (chunk) => {
    text += chunk;
  });
  const ended = new Promise((resolve) => child.once('close', resolve));
  await new Promise((resolve) => child.stderr.once('data', resolve));
  if (work) await work();
  else await new Promise((resolve) => setTimeout(resolve, turnMs));
  child.stdin.end();
  await ended;
  return Number(text);
}

async function runRedis(context: BenchContext): Promise<Figure[]> {
  // For looking at other settings than the default.
  const { options } = argumentsOf('redis', context.args, { options: { partBytes: 'count', depth: 'count' } });
  const server = await RedisServer.start();
  const arenaPath = `/dev/shm/kvtier-bench-redis-${process.pid}`;
  const arena = native.arenaCreate(arenaPath, arenaBytes, 2);
  unlinkSync(arenaPath); // the mapping is enough
  const slots = new ArenaTier({ arena, arenaBytes, nowUs: () => performance.now() * 1000 });
  const error = (fields: object, message: string): void => context.log(`${message} ${JSON.stringify(fields)}`);
  const log = { info: () => {}, warn: error, error };
  const settings = {
    ...defaultRedisSettings,
    ...(options.partBytes !== undefined && { partBytes: options.partBytes }),
    ...(options.depth !== undefined && { depth: options.depth }),
    servers: [server.url],
    bytes: budgetBytes,
    timeLimitMs: 5000,
  };
  const tier = await RedisTier.open({ settings, arena, memory: new ArenaMemory(arena, arenaBytes), slots, log });
  try {
    const measured = await measure(context, tier, slots, server, (slot, bytes) =>
      native.arenaWrite(arena, slot, bytes),
    );
    return figuresOf(context, measured);
  } finally {
    await tier.close();
    await slots.close();
    native.arenaClose(arena);
    await server.stop();
  }
}

type Measured = ReadonlyMap<string, readonly number[]>;

async function measure(
  context: BenchContext,
  tier: RedisTier,
  slots: ArenaTier,
  { port, pid: serverPid }: RedisServer,
  arenaWrite: (slot: number, bytes: Uint8Array) => void,
): Promise<Measured> {
  const payload = Buffer.alloc(payloadBytes);
  for (let at = 0; at < payloadBytes; at += 4) payload.writeUInt32LE(Math.imul(at, 2_654_435_761) >>> 0, at);
  const payloadChecksum = native.xxh3_64(payload);
  const places = Array.from({ length: slotCount }, () => slots.allocate(namespace, payloadBytes)!);
  for (const slot of places) arenaWrite(slot + headerBytes, payload);
  let made = 0;
  let written: HashKey[] = [];
  const batchAt = (worker: number): number[] => places.slice(worker * batchBlocks, (worker + 1) * batchBlocks);
  /** What an engine would have done already is made before a turn. */
  const names: { hash: HashKey; header: Uint8Array }[] = [];
  const nameOne = (): { hash: HashKey; header: Uint8Array } => {
    const hash = createHash('sha256').update(`block ${made++}`).digest().toString('latin1') as HashKey;
    const fields = { namespace: namespace.digest, hash, parent: null, tokenCount: 16, payloadBytes, payloadChecksum };
    return { hash, header: encodeHeader(fields) };
  };
  const write = async (worker: number): Promise<void> => {
    const blocks = batchAt(worker).map((slot): SlotBlock => {
      const { hash, header } = names.pop() ?? nameOne();
      arenaWrite(slot, header);
      return { hash, slot };
    });
    const statuses = await tier.write(namespace, blocks);
    if (statuses.some((status) => status !== 'stored')) throw new KvError('IO', `redis: a write was ${statuses}`);
    written = [...written, ...blocks.map(({ hash }) => hash)].slice(-100);
  };
  const read = async (worker: number): Promise<void> => {
    const blocks = batchAt(worker).map((slot) => ({
      slot,
      hash: written[Math.floor(Math.random() * written.length)]!,
    }));
    await tier.read(namespace, blocks, (_, status) => {
      if (status !== 'ready') throw new KvError('IO', `redis: a read was ${status}`);
    });
  };
  /** GB/s, and CPU seconds per GB: of this process and of the server. */
  const turn = async (move: (worker: number) => Promise<void>): Promise<[number, number, number]> => {
    while (names.length < namesOfATurn) names.push(nameOne());
    const startMs = performance.now();
    const cpu = process.cpuUsage();
    const serverCpu = cpuSecondsOf(serverPid);
    let batches = 0;
    const worker = async (number: number): Promise<void> => {
      while (performance.now() - startMs < turnMs) {
        await move(number);
        batches++;
      }
    };
    await Promise.all(Array.from({ length: batchesInFlight }, (_, number) => worker(number)));
    const bytes = batches * batchBlocks * payloadBytes;
    const { user, system } = process.cpuUsage(cpu);
    const gigabytes = bytes / 1e9;
    return [
      (gigabytes / (performance.now() - startMs)) * 1000,
      (user + system) / 1e6 / gigabytes,
      (cpuSecondsOf(serverPid) - serverCpu) / gigabytes,
    ];
  };
  const memory = Buffer.alloc(slotCount * payloadBytes, 1);
  const measured = new Map<string, number[]>();
  const note = (name: string, value: number): void => {
    measured.set(name, [...(measured.get(name) ?? []), value]);
  };
  // Full once, so that the server's memory is its own and every write evicts. Then each side warm: a node runs for days, and its code
  // is compiled within the first seconds.
  while (tier.stats().evictions === 0) await Promise.all([0, 1, 2, 3].map(write));
  for (let warmUp = 0; warmUp < 3; warmUp++) {
    await turn(write);
    await turn(read);
  }
  for (const kind of ['set', 'get'] as const) await plainSocket(port, kind, memory);
  for (let round = 0; round < rounds; round++) {
    for (const [kind, move] of [
      ['set', write],
      ['get', read],
    ] as const) {
      const plain = async (): Promise<void> => note(`${kind} plain socket`, await plainSocket(port, kind, memory));
      if (round % 2 === 1) await plain(); // who goes first does so in half of the rounds
      const [gbs, cpu, serverCpu] = await turn(move);
      note(kind, gbs);
      note(`${kind} cpu`, cpu);
      note(`${kind} server cpu`, serverCpu);
      if (round % 2 === 0) await plain();
      note(`${kind} redis-benchmark`, await redisBenchmark(port, kind));
      note(
        `${kind} small`,
        await probe(port, async () => {
          note(`${kind} beside small`, (await turn(move))[0]);
        }),
      );
    }
    note('idle small', await probe(port));
  }
  for (const [name, values] of measured) context.log(`${name}: ${values.map((value) => value.toFixed(2)).join(' ')}`);
  return measured;
}

function figuresOf(context: BenchContext, measured: Measured): Figure[] {
  const all = (name: string): readonly number[] => measured.get(name)!;
  const of = (name: string): number => median(all(name));
  const cpu = (kind: string): string =>
    `${kind.toUpperCase()} ${of(`${kind} cpu`).toFixed(2)} + ${of(`${kind} server cpu`).toFixed(2)}`;
  context.log(`CPU seconds per GB, node + server: ${cpu('set')}, ${cpu('get')}`);
  /** Of each round, one by the other. */
  const paired = (value: string, by: string): number => median(all(value).map((each, round) => each / all(by)[round]!));
  return (['set', 'get'] as const).flatMap((kind): Figure[] => {
    const [peer] = ['plain socket', 'redis-benchmark'].sort((a, b) => of(`${kind} ${b}`) - of(`${kind} ${a}`));
    const limit = of(kind) / paired(kind, `${kind} ${peer}`);
    const small = of(`${kind} small`);
    return [
      rate(
        `${kind}_2m`,
        of(kind),
        'GB/s',
        limit,
        `the larger of redis-benchmark and a plain socket (${peer}), ${connections} connections, paired`,
      ),
      time(
        `${kind}_small_p50`,
        small,
        'us',
        (3 * small) / paired(`${kind} small`, 'idle small'),
        '3 x a small GET on an idle server, paired',
      ),
    ];
  });
}

const suite: Suite = {
  name: 'redis',
  description: '2 MiB blocks through the Redis tier, against the server’s own rate; a small GET beside them',
  needs: ['redis-server', 'redis-tools', 'iproute2'],
  unpaced: true,
  run: runRedis,
};
export default suite;
