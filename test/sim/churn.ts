/**
 * npm run sim -- --churn [--blocks N] [--days D]: what a full disk tier with a time to live keeps in memory while blocks come and
 * go, in virtual time. The disk's own index, the store's index behind it and the tier's deadlines are the real ones; the segment
 * that was written longest ago makes room, as in the disk tier. At the end all that is left ends at its time.
 */
import { setFlagsFromString } from 'node:v8';
import { runInNewContext } from 'node:vm';
import type { HashKey } from '@kvtier/identity';
import { Counters, ManualClock, Residency, TierTtl } from '@kvtier/placement/testing';
import type { Tier } from '@kvtier/tiers';
import { DiskIndex, Segment } from '@kvtier/tiers/disk/testing';
import { namespaceNamed } from '@kvtier/tiers/testing';

const perSecond = 500;
const ttlS = 7 * 86_400;
const segmentBlocks = 1_000;
/** Growth after the first part that is allowed: a share, and what is put down to the collector's moods. */
const [growthShare, growthBytes] = [0.1, 16 << 20];

const words = new Int32Array(8);
const bytes = Buffer.from(words.buffer);
/** As even as a digest. */
function named(number: number): HashKey {
  for (let word = 0; word < words.length; word++) {
    const mixed = Math.imul(number + 0x9e3779b9 * (word + 1), 0x85ebca6b);
    words[word] = Math.imul(mixed ^ (mixed >>> 15), 0xc2b2ae35) ^ (mixed >>> 13);
  }
  words[7] = number; // below 2^32: no two are the same
  return bytes.toString('latin1') as HashKey;
}

/** A tier of so many blocks that is always full. */
class FullTier {
  readonly clock = new ManualClock();
  readonly index = new DiskIndex();
  readonly residency = new Residency();
  readonly ttl: TierTtl;
  expired = 0;
  readonly #namespace = namespaceNamed('churn');
  readonly #segments: readonly Segment[];
  #next = 0;

  constructor(blocks: number) {
    this.#segments = Array.from({ length: blocks / segmentBlocks }, (_, id) => new Segment(id, '', 0, 0, 0));
    for (const segment of this.#segments) this.index.register(segment);
    const tier = {
      name: 'disk',
      follow: (listener) => this.index.follow(listener),
      followInPages: (listener) => this.index.followInPages(listener),
      remove: (namespace, hashes) => {
        for (const hash of hashes) this.index.remove(this.index.get(namespace, hash));
        this.expired += hashes.length;
        return hashes.length;
      },
    } as Partial<Tier> as Tier;
    this.ttl = new TierTtl(tier, ttlS, this.clock, 256, new Counters());
    this.residency.follow(tier, 1, (row, namespace, hash, held) => this.ttl.changed(row, namespace, hash, held));
    while (this.#next < blocks) this.store();
  }

  store(): void {
    const segment = this.#segments[Math.floor(this.#next / segmentBlocks) % this.#segments.length]!;
    if (this.#next % segmentBlocks === 0) {
      this.index.drop([segment], false);
      this.index.clear(segment);
    }
    this.index.add(this.#namespace, named(this.#next++), segment, 1, 1);
  }
}

const toStdout = (text: string): void => void process.stdout.write(text);
type Print = (text: string) => void;

export async function runChurn(blocks: number, days: number, print: Print = toStdout): Promise<number> {
  if (!(blocks >= 2 * segmentBlocks && blocks % segmentBlocks === 0 && days > 0 && days <= 365)) {
    const told = `--blocks has to be a multiple of ${segmentBlocks}, 2 of them at least, and --days 365 at most`;
    process.stderr.write(`sim: ${told}\n`);
    return 2;
  }
  setFlagsFromString('--expose-gc');
  const collect = runInNewContext('gc') as () => void;
  const tier = new FullTier(blocks);
  const sizes: { readonly indexes: number; readonly heap: number; readonly rss: number }[] = [];
  const parts = days < 2 ? 4 : Math.floor(days);
  const partS = Math.floor((days * 86_400) / parts);
  for (let part = 0; part <= parts; part++) {
    for (let second = 0; part > 0 && second < partS; second++) {
      for (let i = 0; i < perSecond; i++) tier.store();
      tier.clock.advance(1_000);
      // Other timers of this process have their turn, and so has the collector.
      if (second % 5 === 0) await new Promise((resolve) => setImmediate(resolve));
    }
    collect();
    const { heapUsed, arrayBuffers, rss } = process.memoryUsage();
    const indexes = tier.ttl.bytes + tier.residency.bytes + tier.index.table.bytes;
    sizes.push({ indexes, heap: heapUsed + arrayBuffers, rss });
    const mib = [indexes, heapUsed, arrayBuffers, rss].map((size) => (size / 2 ** 20).toFixed(1));
    print(
      `day ${((part * partS) / 86_400).toFixed(2)}: ${tier.ttl.count} blocks, ${tier.expired} ended; indexes ${mib[0]} MiB, heap ${mib[1]}, buffers ${mib[2]}, rss ${mib[3]}\n`,
    );
  }
  let failure: string | undefined;
  for (const kind of ['indexes', 'heap', 'rss'] as const) {
    const first = Math.max(...sizes.slice(0, 2).map((size) => size[kind]));
    const most = first * (1 + growthShare) + (kind === 'indexes' ? 0 : growthBytes);
    if (sizes.at(-1)![kind] > most) failure = `${kind} grew with what passed through`;
  }
  if (tier.ttl.count < blocks - segmentBlocks || tier.ttl.count > blocks)
    failure = `${tier.ttl.count} blocks have an end`;
  const held = tier.ttl.count;
  const before = tier.expired;
  tier.clock.advance(ttlS * 1_000);
  while (tier.ttl.count > 0) tier.clock.advance(1);
  tier.ttl.checkIntegrity();
  if (tier.expired - before !== held || tier.residency.count !== 0 || tier.clock.pending !== 0)
    failure = `of ${held} blocks ${tier.expired - before} ended, ${tier.residency.count} are left in the index`;
  print(`${days} days of ${perSecond} blocks a second: ${failure ?? 'memory is flat, and all ended at their time'}\n`);
  return failure === undefined ? 0 : 1;
}
