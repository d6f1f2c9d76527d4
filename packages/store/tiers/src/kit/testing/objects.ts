/**
 * What tests of tiers share: an arena of their own, deterministic payloads, and slots that hold whole objects. A payload
 * is a function of its namespace and hash, so that a wrong block is always recognised as one.
 */
import { createHash } from 'node:crypto';
import { mkdirSync, mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { encodeHeader, type HashKey, headerBytes, type Namespace, namespaceFromDigest } from '@kvtier/identity';
import type { Log } from '@kvtier/runtime';
import { ArenaTier } from '../../arena/arena-tier.ts';
import { identitiesOf } from '../../disk/disk-io.ts';
import type { Tier } from '../tier.ts';
import { LawBroken } from './law.ts';

export const silentLog: Log = { info: () => {}, warn: () => {}, error: () => {} };

const digestOf = (text: string): Buffer => createHash('sha256').update(text).digest();
export const namespaceNamed = (name: string): Namespace => namespaceFromDigest(digestOf(`namespace ${name}`));
export const hashNamed = (name: string | number): HashKey => digestOf(`hash ${name}`).toString('latin1') as HashKey;

export function payloadOf(namespace: Namespace, hash: HashKey, bytes: number): Buffer {
  const seed = createHash('sha256').update(namespace.digest).update(hash, 'latin1').digest();
  const payload = Buffer.alloc(bytes, seed);
  for (let at = 0; at + 4 <= bytes; at += 4096) payload.writeUInt32LE(at, at); // pages differ from each other
  return payload;
}

/** A folder and an arena, and slots in it. `dispose` removes all of it. */
export class TestBench {
  readonly dir: string;
  readonly arena: ArenaHandle;
  readonly tier: ArenaTier;
  readonly #scratch = namespaceNamed('scratch');

  /** `dir`: a folder to use, made if it is not there. */
  constructor(arenaBytes = 32 << 20, dir = mkdtempSync(join(tmpdir(), 'kvtier-tier-'))) {
    this.dir = dir;
    mkdirSync(dir, { recursive: true });
    this.arena = native.arenaCreate(join(this.dir, 'arena'), arenaBytes, 2);
    this.tier = new ArenaTier({ arena: this.arena, arenaBytes, nowUs: () => performance.now() * 1000 });
  }

  dispose(): void {
    native.arenaClose(this.arena);
    rmSync(this.dir, { recursive: true });
  }

  #allocate(payloadBytes: number): number {
    const slot = this.tier.allocate(this.#scratch, payloadBytes);
    if (slot === undefined) throw new Error(`the test's arena has no room for ${payloadBytes} bytes; make it larger`);
    return slot;
  }

  /** An empty slot, filled with a pattern, so that what was there before is no object. */
  emptySlot(payloadBytes: number): number {
    const slot = this.#allocate(payloadBytes);
    native.arenaWrite(this.arena, slot, Buffer.alloc(headerBytes + payloadBytes, 0xee));
    return slot;
  }

  /** A slot that holds the object of this name. */
  filledSlot(
    namespace: Namespace,
    hash: HashKey,
    payloadBytes: number,
    parent: HashKey | null = null,
    expiresS = 0,
  ): number {
    const payload = payloadOf(namespace, hash, payloadBytes);
    const slot = this.emptySlot(payloadBytes);
    const payloadChecksum = native.xxh3_64(payload);
    const fields = { namespace: namespace.digest, hash, parent, tokenCount: 16, payloadBytes, payloadChecksum };
    native.arenaWrite(this.arena, slot, Buffer.concat([encodeHeader({ ...fields, expiresS }), payload]));
    return slot;
  }

  /** A slot with the object of that name in namespace "one", and its 64 bytes of identity. */
  filledObject(name: string, payloadBytes: number): { slot: number; identity: Buffer } {
    const namespace = namespaceNamed('one');
    const identity = identitiesOf(namespace, [hashNamed(name)]);
    return { slot: this.filledSlot(namespace, hashNamed(name), payloadBytes), identity };
  }

  /** Flip one bit of the arena. */
  flip(offset: number): void {
    const [byte] = native.arenaRead(this.arena, offset, 1);
    native.arenaWrite(this.arena, offset, Uint8Array.of(byte! ^ 1));
  }

  payloadAt(slot: number, payloadBytes: number): Buffer {
    return native.arenaRead(this.arena, slot + headerBytes, payloadBytes);
  }

  /** Write blocks of one size through slots that are given back. */
  async write(tier: Tier, namespace: Namespace, hashes: readonly HashKey[], payloadBytes: number, expiresS = 0) {
    const blocks = hashes.map((hash) => ({
      hash,
      slot: this.filledSlot(namespace, hash, payloadBytes, null, expiresS),
    }));
    try {
      return await tier.write(namespace, blocks);
    } finally {
      for (const { slot } of blocks) this.tier.free(slot);
    }
  }

  /** Write one block of a chain; its header names its parent. */
  async writeChild(tier: Tier, namespace: Namespace, hash: HashKey, parent: HashKey | null, payloadBytes: number) {
    const slot = this.filledSlot(namespace, hash, payloadBytes, parent);
    try {
      return (await tier.write(namespace, [{ hash, slot }]))[0]!;
    } finally {
      this.tier.free(slot);
    }
  }

  /** Read blocks; throws when what a tier calls 'ready' is not exactly the block that was asked for. */
  async read(tier: Tier, namespace: Namespace, hashes: readonly HashKey[], payloadBytes: number) {
    const blocks = hashes.map((hash) => ({ hash, slot: this.emptySlot(payloadBytes) }));
    const statuses: (string | undefined)[] = hashes.map(() => undefined);
    try {
      await tier.read(namespace, blocks, (index, status) => {
        if (statuses[index] !== undefined) throw new Error(`block ${index} ended twice`);
        statuses[index] = status;
        const { hash, slot } = blocks[index]!;
        if (status !== 'ready') return;
        if (!this.payloadAt(slot, payloadBytes).equals(payloadOf(namespace, hash, payloadBytes))) {
          throw new LawBroken(1, `a wrong block was delivered as ${index}`);
        }
      });
      return statuses;
    } finally {
      for (const { slot } of blocks) this.tier.free(slot);
    }
  }
}
