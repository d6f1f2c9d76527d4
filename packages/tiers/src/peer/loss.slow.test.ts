/** Packets lost between two nodes in namespaces of their own: no wrong block, no read that hangs, and all is well afterwards. */
import type { ChildProcess } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface, type Interface } from 'node:readline';
import { fileURLToPath } from 'node:url';
import { afterAll, expect, it } from 'vitest';
import { NetworkSpaces } from '../testing/network-spaces.ts';

const blockCount = 16;
const payloadBytes = 256 << 10;
const readLimitMs = 1000;
const spaces = NetworkSpaces.open();
const dir = mkdtempSync(join(tmpdir(), 'kvtier-loss-'));
const children: ChildProcess[] = [];
afterAll(async () => {
  for (const child of children) {
    child.stdin!.end();
    const killer = setTimeout(() => child.kill('SIGKILL'), 5000);
    if (child.exitCode === null && child.signalCode === null) await once(child, 'exit');
    clearTimeout(killer);
  }
  spaces?.close();
  rmSync(dir, { recursive: true });
});

function start(space: string, name: string, ...args: readonly string[]): { child: ChildProcess; lines: Interface } {
  const program = fileURLToPath(new URL(`../testing/${name}.ts`, import.meta.url));
  const child = spaces!.spawn(space, [process.execPath, '--import', 'tsx', program, ...args]);
  children.push(child);
  return { child, lines: createInterface({ input: child.stdout! }) };
}

it.skipIf(spaces === undefined)('packets lost between namespaces', { timeout: 60_000 }, async () => {
  const { first, second } = spaces!;
  const [blocks, bytes] = [String(blockCount), String(payloadBytes)];
  const giver = start(first, 'peer-giver', dir, '0', blocks, bytes, '10.79.0.1');
  const [port] = (await once(giver.lines, 'line')) as [string];
  const fetcher = start(second, 'peer-fetcher', dir, '10.79.0.1', port, blocks, bytes, String(readLimitMs));
  await once(fetcher.lines, 'line');
  const read = async (): Promise<{ ready: number; corrupt: number; ms: number }> => {
    const answered = once(fetcher.lines, 'line');
    fetcher.child.stdin!.write('read\n');
    return JSON.parse(((await answered) as [string])[0]);
  };
  const untilAll = async (): Promise<void> => {
    const limitMs = performance.now() + 20_000;
    while ((await read()).ready < blockCount) {
      if (performance.now() > limitMs) throw new Error('never: all blocks were read');
      await new Promise((resolve) => setTimeout(resolve, 50));
    }
  };
  await untilAll();
  for (const percent of [2, 20, 100]) {
    spaces!.lose(percent);
    for (let round = 0; round < 2; round++) {
      const { ready, corrupt, ms } = await read();
      expect(corrupt).toBe(0);
      expect(ms).toBeLessThan(10 * readLimitMs);
      if (percent === 100) expect(ready).toBe(0);
    }
    spaces!.lose(0);
    await untilAll();
  }
});
