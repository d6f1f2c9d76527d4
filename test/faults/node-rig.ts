/**
 * A real cache node as a process, and an engine that writes real bytes into its arena: what the fault tests of the node
 * are made of. Every payload is derived from its hash, so that whoever reads it can tell whether it is the right one.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readdirSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { program } from '@kvtier/cli';
import { type ArenaHandle, native } from '@kvtier/data-plane';
import { lockFileOf } from '@kvtier/data-plane/places';
import { packed, RawClient } from '@kvtier/session/testing';
import { TurnWatch } from '@kvtier/telemetry/testing';
import { LawBroken } from '@kvtier/tiers/testing';

const root = fileURLToPath(new URL('../..', import.meta.url));
export const payloadBytes = 100_000;
const hashBytes = 16;

export interface NodeExit {
  readonly code: number | null;
  readonly signal: NodeJS.Signals | null;
}

/** One data folder, one socket, one cap; nodes come and go. */
export class NodeRig {
  readonly folder = mkdtempSync(path.join(tmpdir(), 'kvtier-node-'));
  readonly dataDir = path.join(this.folder, 'data');
  readonly arenaDir = '/dev/shm';
  readonly socketPath = path.join(this.folder, 'run', 'node.sock');
  readonly arenaBytes: number;
  readonly diskBytes: number | null;
  child: ChildProcess | undefined;
  arenaPath = '';
  stderr = '';
  exit: Promise<NodeExit> | undefined;
  watch: TurnWatch | undefined;

  constructor(options: { readonly arenaBytes?: number; readonly diskBytes?: number | null } = {}) {
    this.arenaBytes = options.arenaBytes ?? 16 << 20;
    this.diskBytes = options.diskBytes === undefined ? 64 << 20 : options.diskBytes;
  }

  get config(): object {
    const disk = this.diskBytes === null ? null : { bytes: this.diskBytes };
    const { socketPath, dataDir, arenaDir: dir, arenaBytes: bytes } = this;
    return { socketPath, dataDir, arena: { bytes, dir }, disk, logLevel: 'warn' };
  }

  /** Resolves when the node serves; rejects with its complaint when it ends instead. */
  async start(
    options: { readonly fault?: string; readonly config?: object; readonly prefix?: readonly string[] } = {},
  ): Promise<void> {
    const env = { ...process.env, KVTIER_CONFIG: JSON.stringify({ ...this.config, ...options.config }) };
    const withFault = options.fault === undefined ? env : { ...env, KVTIER_FAULT: options.fault };
    const stdio = ['ignore', 'ignore', 'pipe', 'ipc'] as const;
    const [file, ...args] = [...(options.prefix ?? []), process.execPath, ...program('cache-node')];
    const child = spawn(file!, args, { cwd: root, env: withFault, stdio: [...stdio] });
    this.child = child;
    this.stderr = '';
    child.stderr!.on('data', (text) => {
      this.stderr += text;
    });
    this.exit = once(child, 'close').then(([code, signal]) => ({ code, signal }) as NodeExit);
    this.watch = new TurnWatch(child);
    const ready = once(child, 'message').then(([message]) => message as { ready: { arenaPath: string } });
    const first = await Promise.race([ready, this.exit]);
    if (!('ready' in first)) throw new Error(this.stderr.trim());
    this.arenaPath = first.ready.arenaPath;
  }

  /** @throws Error when its event loop had a turn above 50 ms, and it ended in order */
  async stop(signal: NodeJS.Signals = 'SIGTERM'): Promise<NodeExit> {
    this.child!.kill(signal);
    const exit = await this.exit!;
    this.watch!.check('cache-node');
    return exit;
  }

  async attach(): Promise<NodeClient> {
    const client = await RawClient.connect(this.socketPath);
    const attached = await client.attach({ payloadBytes: BigInt(payloadBytes), hashBytes });
    const arena = native.arenaOpen(attached.arenaPath, Number(attached.arenaBytes), attached.arenaId);
    return new NodeClient(client, arena);
  }

  /** Arena files of this node's data folder. */
  get arenaFiles(): string[] {
    const names = this.#sharedFiles;
    return names.filter((name) => !names.some((arena) => lockFileOf(arena) === name)); // a lock file goes with its arena
  }

  /** Told by the digest in their names. */
  get #sharedFiles(): string[] {
    if (this.arenaPath === '') return [];
    const prefix = path.basename(this.arenaPath).slice(0, 'kvtier-12345678-'.length);
    return readdirSync(this.arenaDir).filter((name) => name.startsWith(prefix));
  }

  /** Bytes that the data folder takes on disk: the larger of apparent size and allocated blocks, file by file. */
  get diskUsage(): number {
    let bytes = 0;
    for (const name of readdirSync(this.dataDir, { recursive: true }) as string[]) {
      const found = statSync(path.join(this.dataDir, name), { throwIfNoEntry: false });
      if (found?.isFile()) bytes += Math.max(found.size, found.blocks * 512);
    }
    return bytes;
  }

  async dispose(): Promise<void> {
    if (this.child?.exitCode === null && this.child.signalCode === null) await this.stop('SIGKILL');
    for (const name of this.#sharedFiles) rmSync(path.join(this.arenaDir, name));
    rmSync(this.folder, { recursive: true });
  }
}

/** The bytes that belong to a hash. */
export function payloadOf(hash: Buffer): Buffer {
  const payload = Buffer.alloc(payloadBytes, hash);
  payload.writeUInt32LE(hash[0]!, 0);
  return payload;
}

export class NodeClient {
  readonly client: RawClient;
  readonly arena: ArenaHandle;

  constructor(client: RawClient, arena: ArenaHandle) {
    this.client = client;
    this.arena = arena;
  }

  /** Reserve, write, commit blocks `first`.. of a chain. Returns how many the node has taken over. */
  async put(name: string, count: number, first = 0): Promise<number> {
    const parent = first === 0 ? Buffer.alloc(0) : packed(name, 1, first - 1);
    const hashes = packed(name, count, first);
    const reserved = await this.client.call({ $case: 'reserve', value: { parent, hashes } }, 'reserved');
    const offsets: bigint[] = [];
    const checksums: bigint[] = [];
    for (const [index, offset] of reserved.offsets.entries()) {
      if (offset === 0n) continue;
      const payload = payloadOf(hashes.subarray(index * hashBytes, (index + 1) * hashBytes));
      native.arenaWrite(this.arena, Number(offset), payload);
      offsets.push(offset);
      checksums.push(native.xxh3_64(payload));
    }
    if (offsets.length === 0) return 0;
    return (await this.client.call({ $case: 'commit', value: { offsets, checksums } }, 'done')).count;
  }

  /** Load a chain, check every byte of what arrives, release. */
  async load(name: string, count: number, deadlineMs = 10_000) {
    const hashes = packed(name, count);
    const id = this.client.send({ $case: 'load', value: { hashes, deadlineMs } });
    const { loaded, reason } = await this.client.answer(id, 'loadDone');
    const tiers: string[] = [];
    while (tiers.length < loaded) {
      const ready = await this.client.answer(id, 'ready');
      for (const [index, offset] of ready.offsets.entries()) {
        const at = (ready.first + index) * hashBytes;
        const bytes = native.arenaRead(this.arena, Number(offset), payloadBytes);
        if (!bytes.equals(payloadOf(hashes.subarray(at, at + hashBytes))))
          throw new LawBroken(1, `${name}: wrong bytes served`);
        if (native.xxh3_64(bytes) !== ready.checksums[index]) throw new LawBroken(1, `${name}: wrong checksum served`);
        tiers.push(ready.tier);
      }
    }
    await this.client.call({ $case: 'release', value: { loadId: id, corrupt: [] } }, 'done');
    return { loaded, reason, tiers };
  }

  async lookup(name: string, count: number) {
    return this.client.call({ $case: 'lookup', value: { hashes: packed(name, count) } }, 'lookup');
  }

  async stats() {
    return this.client.call({ $case: 'stats', value: {} }, 'stats');
  }

  async end(): Promise<void> {
    await this.client.end();
    native.arenaClose(this.arena);
  }
}
