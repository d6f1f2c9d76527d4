/** Where a seccomp filter forbids vmsplice (a container's own profile), a node copies what it gives, and gives the same. */
import { type ChildProcess, spawn } from 'node:child_process';
import { once } from 'node:events';
import { fileURLToPath } from 'node:url';
import { afterEach, beforeEach, expect, it } from 'vitest';
import { hashNamed, namespaceNamed, TestBench } from '../kit/testing/objects.ts';
import type { PeerLoops } from './peer-loops.ts';
import type { PeerTier } from './peer-tier.ts';
import { fetchingTier, loopsOf, sharedSecret, until } from './testing/peer-pair.ts';

// A filter that answers vmsplice (278 on x86-64) with EPERM and allows the rest; then the command.
const underSeccomp = `
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 278), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
`;
const program = fileURLToPath(new URL('./testing/peer-giver.ts', import.meta.url));
const blockCount = 16;
const payloadBytes = 1 << 20;
const space = namespaceNamed('one');
const hashes = Array.from({ length: blockCount }, (_, i) => hashNamed(i));

let bench: TestBench;
let loops: PeerLoops;
let tier: PeerTier | undefined;
let child: ChildProcess | undefined;
beforeEach(() => {
  bench = new TestBench(64 << 20);
  loops = loopsOf(bench, sharedSecret());
});
afterEach(async () => {
  await tier?.close();
  await loops.close();
  child?.kill('SIGKILL');
  if (child !== undefined && child.exitCode === null && child.signalCode === null) await once(child, 'exit');
  bench.dispose();
});

it('gives without vmsplice', async (context) => {
  const giver = [
    process.execPath,
    '--import',
    'tsx',
    program,
    bench.dir,
    '0',
    String(blockCount),
    String(payloadBytes),
  ];
  const started = spawn('/usr/bin/python3', ['-c', underSeccomp, ...giver], { stdio: ['pipe', 'pipe', 'inherit'] });
  const said = await Promise.race([once(started.stdout, 'data'), once(started, 'exit'), once(started, 'error')]).catch(
    () => [],
  );
  const port = Number(String(said[0]));
  if (!Buffer.isBuffer(said[0]) || !(port > 0)) {
    console.warn('SKIPPED: a node that may not use vmsplice is not tested: no python3, or no seccomp here');
    return context.skip();
  }
  child = started;
  const one = fetchingTier(bench, loops, [port], { readLimitMs: 20_000 });
  tier = one;
  await until('the peer is there', () => {
    const { usable_peers, listed_peers } = one.stats().detail!;
    return usable_peers === 1 && listed_peers === 1;
  });
  expect(await bench.read(one, space, hashes, payloadBytes)).toEqual(hashes.map(() => 'ready'));
  one.checkIntegrity();
});
