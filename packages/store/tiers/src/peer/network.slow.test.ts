/**
 * Two nodes in namespaces of their own. Packets lost between them: no wrong block, no read that hangs, and all is well afterwards.
 * A narrow way, whose sockets are always full. Near and far: who paces what it sends.
 */
import { type ChildProcess, execFileSync } from 'node:child_process';
import { once } from 'node:events';
import { mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { createInterface, type Interface } from 'node:readline';
import { afterAll, expect, it } from 'vitest';
import { bundled } from '../../../../../scripts/lib/test-programs.mjs';
import { makeCertificates } from '../kit/testing/certificates.ts';
import { NetworkSpaces } from '../kit/testing/network-spaces.ts';

const [giverFile, fetcherFile] = await bundled(
  new URL('./testing/peer-giver.ts', import.meta.url),
  new URL('./testing/peer-fetcher.ts', import.meta.url),
);
const blockCount = 16;
const payloadBytes = 256 << 10;
const readLimitMs = 1000;
const spaces = NetworkSpaces.open();
const dir = mkdtempSync(join(tmpdir(), 'kvtier-loss-'));
const children: ChildProcess[] = [];
const controlPorts: string[] = [];
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

interface Read {
  readonly ready: number;
  readonly corrupt: number;
  readonly ms: number;
}

function start(space: string, program: string, ...args: readonly string[]): { child: ChildProcess; lines: Interface } {
  const child = spaces!.spawn(space, [process.execPath, program, ...args]);
  children.push(child);
  return { child, lines: createInterface({ input: child.stdout! }) };
}

/** A giver at this address, a fetcher in the other space. `read` asks it for all blocks once. */
async function pairAt(
  address: string,
  { encryption = 'none', count = blockCount, limitMs = readLimitMs } = {},
): Promise<() => Promise<Read>> {
  const [blocks, bytes] = [String(count), String(payloadBytes)];
  const giver = start(spaces!.first, giverFile, dir, '0', blocks, bytes, address, encryption);
  const [port] = (await once(giver.lines, 'line')) as [string];
  controlPorts.push(port);
  const fetcher = start(spaces!.second, fetcherFile, dir, address, port, blocks, bytes, String(limitMs), encryption);
  await once(fetcher.lines, 'line');
  const read = async (): Promise<Read> => {
    const answered = once(fetcher.lines, 'line');
    fetcher.child.stdin!.write('read\n');
    return JSON.parse(((await answered) as [string])[0]);
  };
  return read;
}

it.skipIf(spaces === undefined)('packets lost between namespaces', { timeout: 60_000 }, async () => {
  const read = await pairAt('10.79.0.1');
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

it.skipIf(spaces === undefined)('a way so narrow that TLS records have to wait', { timeout: 60_000 }, async () => {
  makeCertificates(dir, '10.79.0.1');
  const count = 6 * blockCount; // more than sockets hold
  const read = await pairAt('10.79.0.1', { encryption: 'tls', count, limitMs: 5 * readLimitMs });
  const limitMs = performance.now() + 20_000;
  while ((await read()).ready < count) expect(performance.now(), 'all blocks, once').toBeLessThan(limitMs);
  spaces!.narrow('800mbit');
  for (let round = 0; round < 20; round++) {
    expect(await read()).toMatchObject({ ready: count, missing: 0, failed: 0, corrupt: 0 });
  }
  spaces!.narrow(null);
});

/** Congestion control of the data connections at this address: all but those to a control port. */
function controlOfStreams(address: string): string[] {
  const sockets = execFileSync('ip', ['netns', 'exec', spaces!.first, 'ss', '-tinOH', 'state', 'established']);
  const streams = String(sockets)
    .split('\n')
    .filter((line) => line.includes(address) && !controlPorts.some((port) => line.includes(`:${port} `)));
  return streams.map((line) => /\b(bbr\d?|cubic|reno)\b/.exec(line)?.[1] ?? line);
}

const paced = readFileSync('/proc/sys/net/ipv4/tcp_congestion_control', 'latin1').trim();
it.skipIf(spaces === undefined)('a system that paces does so far away, and not near', async (context) => {
  if (!paced.startsWith('bbr') || !(await spaces!.lengthen(5))) {
    console.warn(
      `SKIPPED: who paces is not tested: needs BBR as the system's default (here ${paced}), python3 and TUN`,
    );
    return context.skip();
  }
  for (const [address, expected] of [
    ['10.79.0.1', ['cubic', 'reno']],
    ['10.78.0.1', [paced]],
  ] as const) {
    const read = await pairAt(address);
    const limitMs = performance.now() + 20_000;
    let found: string[] = [];
    while (found.length === 0 || !found.every((each) => (expected as readonly string[]).includes(each))) {
      expect(performance.now(), `${address}: ${found}`).toBeLessThan(limitMs);
      await read();
      found = controlOfStreams(address);
    }
  }
});
