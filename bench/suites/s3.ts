/**
 * The S3 tier against plain HTTP by undici, on the same server (Ceph RGW, started here) in the same run: put and get of blocks of
 * 1, 8 and 32 MiB, as many in flight. Ours claims a slot, evicts, stores a pack, reads by range into the arena and verifies each
 * object; undici sends and receives the same bytes, signed by nobody (the bucket is public), into memory that is dropped. Rounds
 * are paired: each side takes its turn in each round, and the median of the rounds’ ratios counts. CPU seconds per GB are this process's, both sides.
 * Server and clients share this machine's cores. `npm run bench -- s3 1m` measures one size only.
 */
import { createHash } from 'node:crypto';
import { unlinkSync } from 'node:fs';
import { native } from '@kvtier/data-plane';
import { KvError } from '@kvtier/errors';
import { encodeHeader, type HashKey, headerBytes, namespaceFromDigest } from '@kvtier/identity';
import { ArenaMemory, ArenaTier, type SlotBlock } from '@kvtier/tiers';
import { S3Tier } from '@kvtier/tiers/s3';
import { Bucket } from '@kvtier/tiers/s3/testing';
import { Agent, request } from 'undici';
import { S3Server, s3Credentials } from '../../infra/s3/servers.ts';
import { argumentsOf } from '../arguments.ts';
import { type BenchContext, type Figure, median, rate, type Suite, time } from '../figures.ts';

/** An even number: who goes first has a third more of a server that writes behind. More would fill it: RGW frees hours later. */
const rounds = 4;
const mib = 1 << 20;
/** Blocks in flight, by payload size: about what 16 connections hold. */
const sizes = [
  { name: '1m', payloadBytes: 1 * mib, inFlight: 16, blocksPerTurn: 128 },
  { name: '8m', payloadBytes: 8 * mib, inFlight: 8, blocksPerTurn: 16 },
  { name: '32m', payloadBytes: 32 * mib, inFlight: 4, blocksPerTurn: 8 },
] as const;
const arenaBytes = 192 * mib;
const namespace = namespaceFromDigest(createHash('sha256').update('bench s3').digest());

interface Turn {
  readonly gbs: number;
  /** CPU seconds of this process per GB. */
  readonly cpu: number;
}

async function turnOf(
  blockCount: number,
  inFlight: number,
  bytes: number,
  move: (at: number, lane: number) => Promise<void>,
) {
  const startMs = performance.now();
  const cpu = process.cpuUsage();
  let next = 0;
  const lane = async (number: number): Promise<void> => {
    while (next < blockCount) await move(next++, number);
  };
  await Promise.all(Array.from({ length: inFlight }, (_, number) => lane(number)));
  const { user, system } = process.cpuUsage(cpu);
  const total = blockCount * bytes;
  return { gbs: total / (performance.now() - startMs) / 1e6, cpu: (user + system) / 1e6 / (total / 1e9) };
}

async function measureSize(
  context: BenchContext,
  server: S3Server,
  bucket: Bucket,
  { name, payloadBytes, inFlight, blocksPerTurn }: (typeof sizes)[number],
): Promise<Figure[]> {
  const arenaPath = `/dev/shm/kvtier-bench-s3-${process.pid}`;
  const arena = native.arenaCreate(arenaPath, arenaBytes, 2);
  unlinkSync(arenaPath); // the mapping is enough
  const slots = new ArenaTier({ arena, arenaBytes, nowUs: () => performance.now() * 1000 });
  const error = (fields: object, message: string): void => context.log(`${message} ${JSON.stringify(fields)}`);
  const packBytes = payloadBytes + 64 * 1024;
  const tier = await S3Tier.open({
    ...{ endpoint: server.url, bucket: bucket.name, prefix: `tier-${name}`, ...s3Credentials },
    // Two turns' worth: the first rounds fill it, later ones evict.
    ...{ packBytes, bytes: 2 * blocksPerTurn * packBytes + 65_536, flushMs: 0, timeLimitMs: 60_000 },
    ...{ arena, memory: new ArenaMemory(arena, arenaBytes), slots, log: { info: () => {}, warn: error, error } },
  });
  const agent = new Agent({ connections: inFlight, pipelining: 1 });
  const objectBytes = headerBytes + payloadBytes;
  const payload = Buffer.alloc(payloadBytes);
  for (let at = 0; at < payloadBytes; at += 4) payload.writeUInt32LE(Math.imul(at, 2_654_435_761) >>> 0, at);
  const payloadChecksum = native.xxh3_64(payload);
  const places = Array.from({ length: inFlight }, () => slots.allocate(namespace, payloadBytes)!);
  for (const slot of places) native.arenaWrite(arena, slot + headerBytes, payload);
  let made = 0;
  let written: HashKey[] = [];
  const put = async (lane: number): Promise<void> => {
    const slot = places[lane]!;
    const hash = createHash('sha256').update(`${name} ${made++}`).digest().toString('latin1') as HashKey;
    const fields = { namespace: namespace.digest, hash, parent: null, tokenCount: 16, payloadBytes, payloadChecksum };
    native.arenaWrite(arena, slot, encodeHeader(fields));
    const [status] = await tier.write(namespace, [{ hash, slot }]);
    if (status !== 'stored') throw new KvError('IO', `s3: a write was ${status}`);
    written = [...written, hash].slice(-blocksPerTurn);
  };
  const get = async (at: number, lane: number): Promise<void> => {
    const block: SlotBlock = { slot: places[lane]!, hash: written[at % written.length]! };
    await tier.read(namespace, [block], (_, status) => {
      if (status !== 'ready') throw new KvError('IO', `s3: a read was ${status}`);
    });
  };
  const body = Buffer.alloc(objectBytes, payload);
  const urlOf = (at: number): string => `${server.url}/${bucket.name}/plain-${name}-${at}`;
  const plainPut = async (at: number): Promise<void> => {
    const reply = await request(urlOf(at), {
      method: 'PUT',
      body,
      headers: { 'x-amz-acl': 'public-read' },
      dispatcher: agent,
    });
    await reply.body.dump();
    if (reply.statusCode !== 200) throw new KvError('IO', `plain put: HTTP ${reply.statusCode}`);
  };
  const plainGet = async (at: number): Promise<void> => {
    const reply = await request(urlOf(at), { dispatcher: agent });
    let bytes = 0;
    for await (const chunk of reply.body) bytes += (chunk as Buffer).length;
    if (bytes !== objectBytes) throw new KvError('IO', `plain get: ${bytes} bytes, HTTP ${reply.statusCode}`);
  };
  const measured = { put: [] as Turn[], get: [] as Turn[], plainPut: [] as Turn[], plainGet: [] as Turn[] };
  try {
    for (let round = 0; round <= rounds; round++) {
      const turn = (move: (at: number, lane: number) => Promise<void>): Promise<Turn> =>
        turnOf(blocksPerTurn, inFlight, objectBytes, move);
      const pairs = [
        ['put', (_: number, lane: number) => put(lane), 'plainPut', plainPut],
        ['get', get, 'plainGet', plainGet],
      ] as const;
      for (const [ours, ourMove, plain, plainMove] of pairs) {
        // Who goes first changes from round to round.
        const both = [
          [ours, ourMove],
          [plain, plainMove],
        ] as const;
        for (const [kind, move] of round % 2 === 0 ? both : [...both].reverse()) {
          const result = await turn(move);
          if (round > 0) measured[kind].push(result); // the first warms both sides up
        }
      }
    }
  } finally {
    await tier.close();
    await agent.close();
    await slots.close();
    native.arenaClose(arena);
  }
  for (const key of (await bucket.list()).keys()) await bucket.delete(key);
  const of = (kind: keyof typeof measured, what: keyof Turn): number => median(measured[kind].map((one) => one[what]));
  /** What the peer would have had where we had our median: the server's own rate changes by a third from minute to minute. */
  const limitOf = (kind: 'put' | 'get', plain: 'plainPut' | 'plainGet', what: keyof Turn): number =>
    of(kind, what) / median(measured[kind].map((one, round) => one[what] / measured[plain][round]![what]));
  for (const [kind, turns] of Object.entries(measured)) {
    const text = turns.map(({ gbs, cpu }) => `${gbs.toFixed(2)} (${cpu.toFixed(2)})`).join(' ');
    context.log(`${name} ${kind}, GB/s (CPU s/GB): ${text}`);
  }
  const label = `undici, ${inFlight} in flight, the same server, paired`;
  return (['put', 'get'] as const).flatMap((kind): Figure[] => {
    const plain = kind === 'put' ? 'plainPut' : 'plainGet';
    return [
      rate(`${kind}_${name}`, of(kind, 'gbs'), 'GB/s', limitOf(kind, plain, 'gbs'), label),
      time(
        `${kind}_${name}_cpu`,
        of(kind, 'cpu'),
        's/GB',
        limitOf(kind, plain, 'cpu'),
        `CPU seconds per GB of ${label}`,
      ),
    ];
  });
}

async function runS3(context: BenchContext): Promise<Figure[]> {
  const { words } = argumentsOf('s3', context.args, { words: sizes.map(({ name }) => name) });
  const server = await S3Server.start();
  try {
    const bucket = await Bucket.make(server.url, 'bench', 'public-read-write');
    const figures: Figure[] = [];
    const chosen = sizes.filter(({ name }) => words.length === 0 || words.includes(name));
    for (const size of chosen) figures.push(...(await measureSize(context, server, bucket, size)));
    bucket.close();
    return figures;
  } finally {
    await server.stop();
  }
}

const suite: Suite = {
  name: 's3',
  description: 'blocks of 1, 8 and 32 MiB through the S3 tier, against plain HTTP (undici) on the same Ceph RGW',
  needs: ['ceph-mon', 'ceph-osd', 'radosgw', 'ceph-common'],
  run: runS3,
};
export default suite;
