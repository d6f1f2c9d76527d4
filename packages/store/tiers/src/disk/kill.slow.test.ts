/**
 * SIGKILL at every named step of the disk tier and at random moments, life after life on one folder: what was promised is
 * still there or was evicted, nothing is wrong, the budget holds.
 */
import { type ChildProcess, spawn } from 'node:child_process';
import { mkdtempSync, readdirSync, rmSync, statSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { afterEach, beforeEach, describe, expect, it } from 'vitest';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';
import { byLaw } from '../kit/testing/law.ts';
import { hashNamed, namespaceNamed, silentLog, TestBench } from '../kit/testing/objects.ts';
import { DiskTier } from './disk-tier.ts';
import type { DiskStep } from './options.ts';

const capacityBytes = 2 << 20;
const segmentBytes = 192 << 10;
const payloadBytes = 12_000;
const space = namespaceNamed('writer');
const [writer] = await bundled(new URL('./testing/disk-writer.ts', import.meta.url));

let dir: string;
let bench: TestBench;
beforeEach(() => {
  dir = mkdtempSync(join(tmpdir(), 'kvtier-kill-'));
  bench = new TestBench(16 << 20);
});
afterEach(() => {
  bench.dispose();
  rmSync(dir, { recursive: true });
});

interface Life {
  readonly first: number;
  readonly backend: 'auto' | 'threads';
  readonly killAt?: { step: DiskStep; pass: number };
  /** Kill from outside once so many blocks are stored. */
  readonly killAfter?: number;
}

/** Runs a writer until it is dead; the numbers of the blocks that it called stored. */
async function live(life: Life): Promise<number[]> {
  rmSync(join(dir, 'segments-arena'), { recursive: true, force: true });
  const settings = { dir: join(dir, 'segments'), capacityBytes, segmentBytes, payloadBytes, ...life };
  const child: ChildProcess = spawn(process.execPath, [writer], {
    env: { ...process.env, KVTIER_TEST: JSON.stringify(settings) },
    stdio: ['ignore', 'pipe', 'inherit'],
  });
  let text = '';
  child.stdout!.on('data', (data: Buffer) => {
    text += data;
    if (life.killAfter !== undefined && text.split('\n').length > life.killAfter) child.kill('SIGKILL');
  });
  const signal = await new Promise((resolve) => child.on('close', (_, name) => resolve(name)));
  expect(signal).toBe('SIGKILL');
  expect(text).toMatch(/^(open\n|$)/); // killed while it opened, or later
  return text.split('\n').slice(1, -1).map(Number);
}

const bytesOnDisk = (): number =>
  readdirSync(join(dir, 'segments')).reduce(
    (sum, name) => sum + (statSync(join(dir, 'segments', name), { throwIfNoEntry: false })?.blocks ?? 0) * 512,
    statSync(join(dir, 'segments')).blocks * 512,
  );

/** Opens what is there and reads every block that was ever stored; `promised`: those of the last life, in order. */
async function examine(everStored: readonly number[], promised: readonly number[]): Promise<void> {
  byLaw(3, () => expect(bytesOnDisk()).toBeLessThanOrEqual(capacityBytes));
  const tier = await DiskTier.open({
    ...{
      dir: join(dir, 'segments'),
      capacityBytes,
      segmentBytes,
      arena: bench.arena,
      slots: bench.tier,
      log: silentLog,
    },
    io: { backend: 'threads' },
  });
  tier.checkIntegrity();
  const held = new Set<number>();
  for (const number of everStored) {
    const [status] = await bench.read(tier, space, [hashNamed(number)], payloadBytes); // throws on a wrong block
    expect(['ready', 'missing']).toContain(status);
    if (status === 'ready') held.add(number);
  }
  // Eviction takes whole segments, and the newest two are never among them: 15 blocks each.
  for (const number of promised.slice(-15)) expect(held, `block ${number} was promised`).toContain(number);
  if (promised.length > 0) expect(held, 'the block that is used all the time').toContain(promised[0]);
  byLaw(3, () => expect(tier.stats().bytes).toBeLessThanOrEqual(capacityBytes));
  await tier.close(); // its checkpoint goes: the next life is to find what segments alone say
  rmSync(join(dir, 'segments', 'checkpoint.kvc'), { force: true });
}

describe('SIGKILL', () => {
  const steps: DiskStep[] = [
    'disk.segment.prepared',
    'disk.segment.opened',
    'disk.segment.evicted',
    'disk.seal.before',
    'disk.seal.after',
    'disk.write.submitted',
    'disk.write.stored',
    'disk.close.checkpoint',
  ];

  it.each(steps)('at %s, twice on one folder', async (step) => {
    const everStored: number[] = [];
    for (const [life, pass] of [1, 3].entries()) {
      if (pass === 3 && step === 'disk.close.checkpoint') continue;
      const passes = step.startsWith('disk.write')
        ? pass * 25
        : step === 'disk.segment.prepared' && life > 0
          ? 1
          : pass;
      const stored = await live({ first: life * 10_000, backend: 'auto', killAt: { step, pass: passes } });
      everStored.push(...stored);
      await examine(everStored, stored);
    }
  });

  it('at random moments, life after life', async () => {
    const everStored: number[] = [];
    for (let life = 0; life < 8; life++) {
      const killAfter = 1 + Math.floor(Math.random() * 400);
      const backend = life % 2 === 0 ? 'auto' : 'threads';
      const stored = await live({ first: life * 10_000, backend, killAfter });
      everStored.push(...stored);
      await examine(everStored, stored);
    }
  });
});
