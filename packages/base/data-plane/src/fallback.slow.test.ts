/** Where a seccomp filter forbids io_uring (containers' default profile), "auto" becomes threads and says why. */
import { spawnSync } from 'node:child_process';
import { fileURLToPath } from 'node:url';
import { expect, it } from 'vitest';

// A filter that answers io_uring_setup (425) with EPERM and allows the rest; then the command.
const underSeccomp = `
import ctypes, os, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
rules = [(0x20, 0, 0, 0), (0x15, 0, 1, 425), (0x06, 0, 0, 0x00050001), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(rules), ctypes.addressof(code)))
assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, program, 0, 0) == 0, ctypes.get_errno()
os.execv(sys.argv[1], sys.argv[1:])
`;
const script = `
import { native } from '${fileURLToPath(new URL('./index.ts', import.meta.url))}';
import { rmSync } from 'node:fs';
const path = '/dev/shm/kvtier-fallback-' + process.pid;
const arena = native.arenaCreate(path, 1 << 20, 1);
rmSync(path);
const io = native.ioOpen(arena, { backend: 'auto', depth: 4, ioBytes: 65536 }, () => {});
let strict = '';
try {
  native.ioOpen(arena, { backend: 'io_uring', depth: 4, ioBytes: 65536 }, () => {});
} catch (error) {
  strict = error.message;
}
console.log(JSON.stringify({ ...native.ioBackend(io), strict }));
await native.ioClose(io);
`;

it('falls back to threads where io_uring is forbidden', (context) => {
  const args = ['-c', underSeccomp, process.execPath, '--import', 'tsx', '--input-type=module', '-e', script];
  const cwd = fileURLToPath(new URL('../../../..', import.meta.url));
  const child = spawnSync('/usr/bin/python3', args, { encoding: 'utf8', cwd });
  if (child.error !== undefined || child.stderr.includes('AssertionError')) {
    console.warn(
      `SKIPPED: the io_uring fallback is not tested: no python3 or no seccomp (${child.error ?? child.stderr})`,
    );
    context.skip();
  }
  expect(child.stderr).toBe('');
  const result = JSON.parse(child.stdout);
  expect(result).toMatchObject({ backend: 'threads', reason: expect.stringMatching(/Operation not permitted/) });
  expect(result.strict).toMatch(/^SETUP: io_uring is refused by the kernel .*Operation not permitted/);
});
