/**
 * One node of `bench/suites/peer.ts`, in its network namespace: `give` holds blocks in its arena, `fetch` brings them over. Each
 * line on stdin is a question, answered by a line of JSON; the end of stdin is its end.
 */
import { createHash, randomBytes } from 'node:crypto';
import { existsSync, readFileSync, unlinkSync } from 'node:fs';
import { join } from 'node:path';
import { createInterface } from 'node:readline';
import { native } from '@kvtier/data-plane';
import { type HashKey, headerBytes, namespaceFromDigest } from '@kvtier/identity';
import { ArenaTier, type PeerSecurity } from '@kvtier/tiers';
import { PeerLoops, PeerServer, PeerTier } from '@kvtier/tiers/peer';

const [role, host, port, encryption, payload, scratchDir, streams] = process.argv.slice(2) as string[];
const payloadBytes = Number(payload);
const arenaBytes = 640 << 20;
const blockCount = Math.floor((256 << 20) / payloadBytes);
const batchBlocks = Math.max(1, Math.floor((16 << 20) / payloadBytes));
const batchesInFlight = 4;
const namespace = namespaceFromDigest(createHash('sha256').update('bench peer').digest());
const hashes = Array.from(
  { length: blockCount },
  (_, i) => createHash('sha256').update(`${i}`).digest().toString('latin1') as HashKey,
);
const arenaPath = join(existsSync('/dev/shm') ? '/dev/shm' : scratchDir!, `kvtier-bench-peer-${process.pid}`);
const arena = native.arenaCreate(arenaPath, arenaBytes, 2);
unlinkSync(arenaPath); // the mapping is enough
const slots = new ArenaTier({ arena, arenaBytes, nowUs: () => performance.now() * 1000 });
const pem = (name: string): Buffer => readFileSync(join(scratchDir!, name));
const security: PeerSecurity =
  encryption === 'tls'
    ? { encryption: 'tls', cert: pem('node.pem'), key: pem('node.key'), ca: pem('ca.pem') }
    : { encryption: 'none', secrets: [Buffer.from('bench')] };
const log = {
  info: () => {},
  warn: (fields: object) => process.stderr.write(`${JSON.stringify(fields)}\n`),
  error: () => {},
};
const loops = new PeerLoops({ arena, tls: encryption === 'tls', threads: 2, maxConnections: 64, stallMs: 5000 });
const epoch = randomBytes(8).readBigUInt64LE();
const cpuSeconds = (): number => {
  const { user, system } = process.cpuUsage();
  return (user + system) / 1e6;
};
const say = (value: unknown): void => {
  process.stdout.write(`${JSON.stringify(value)}\n`);
};

async function give(): Promise<{ answer: () => Promise<unknown>; close: () => Promise<void> }> {
  const bytes = Buffer.alloc(payloadBytes);
  for (let at = 0; at < payloadBytes; at += 4) bytes.writeUInt32LE(Math.imul(at, 2_654_435_761) >>> 0, at);
  const checksum = native.xxh3_64(bytes);
  for (const hash of hashes) {
    const slot = slots.allocate(namespace, payloadBytes)!;
    native.arenaWrite(arena, slot + headerBytes, bytes);
    slots.publish(namespace, { hash, parent: null, tokenCount: 16, payloadBytes, checksum }, slot);
  }
  const options = { loops, arena, slots, security, host: host!, port: Number(port), dataPort: 0, epoch, log };
  const server = await PeerServer.open(options);
  let [cpu, sent] = [cpuSeconds(), 0];
  return {
    answer: async () => {
      const difference = { cpu: cpuSeconds() - cpu, bytes: server.counts.sentBytes - sent };
      [cpu, sent] = [cpuSeconds(), server.counts.sentBytes];
      return difference;
    },
    close: () => server.close(),
  };
}

async function fetch(): Promise<{ answer: (line: string) => Promise<unknown>; close: () => Promise<void> }> {
  const peers = [{ host: host!, port: Number(port) }];
  const tier = new PeerTier({ loops, slots, peers, security, epoch, log, streams: Number(streams) });
  while (tier.lookup(namespace, hashes) < hashes.length) await new Promise((resolve) => setTimeout(resolve, 10));
  await new Promise((resolve) => setTimeout(resolve, 200)); // the streams come up
  const free = Array.from({ length: batchesInFlight }, () =>
    Array.from({ length: batchBlocks }, () => slots.allocate(namespace, payloadBytes)!),
  );
  return {
    answer: async (line) => {
      const [startMs, startCpu] = [performance.now(), cpuSeconds()];
      let [moved, next] = [0, 0];
      const worker = async (own: readonly number[]): Promise<void> => {
        while (performance.now() - startMs < Number(line)) {
          const blocks = own.map((slot) => ({ slot, hash: hashes[next++ % hashes.length]! }));
          await tier.read(namespace, blocks, (_, status) => {
            if (status !== 'ready') throw new Error(`a fetch was ${status}`);
            moved += payloadBytes;
          });
        }
      };
      await Promise.all(free.map(worker));
      return { rate: moved / (performance.now() - startMs) / 1e6, cpu: (cpuSeconds() - startCpu) / (moved / 1e9) };
    },
    close: () => tier.close(),
  };
}

const node = role === 'give' ? await give() : await fetch();
say('ready');
for await (const line of createInterface({ input: process.stdin })) say(await node.answer(line));
await node.close();
await loops.close();
native.arenaClose(arena);
