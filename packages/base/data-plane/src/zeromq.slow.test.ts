/** Beside a ZeroMQ library that takes fewer sockets than we ask for: the program brings its own, of some other build. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const source = fileURLToPath(new URL('../cc/test/clipping_zeromq.cc', import.meta.url));
const binding = fileURLToPath(new URL('../../../../build/data-plane/kvtier_data_plane.node', import.meta.url));

it('its own number is kept, and one context serves all', () => {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-zeromq-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const library = join(folder, 'zeromq.node');
  const build = spawnSync('g++', ['-std=c++20', '-shared', '-fPIC', source, '-o', library]);
  expect(build.stderr.toString()).toBe('');
  const program = `
    require(${JSON.stringify(library)});
    const native = require(${JSON.stringify(binding)});
    const options = { endpoint: 'tcp://127.0.0.1:1', topic: '', highWaterMark: 1, maxMessageBytes: 1, ipv6: false, heartbeatMs: 1,
      serverKey: '', publicKey: '', secretKey: '' };
    for (let i = 0; i < 2; i++) {
      try { native.kvEventsOpen(options); } catch (error) { console.error(error.message); }
    }`;
  const { stdout, stderr } = spawnSync(process.execPath, ['-e', program], { encoding: 'utf8' });
  expect(stderr).toBe('socket: no socket\nsocket: no socket\n');
  expect(stdout).toBe('context\n6208 refused\n3104 refused\n1552 refused\n');
});
