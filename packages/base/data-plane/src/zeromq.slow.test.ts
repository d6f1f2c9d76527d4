/** Beside a ZeroMQ library of another build, which takes fewer sockets than we ask for, and beside signals that break its calls off. */
import { spawnSync } from 'node:child_process';
import { mkdtempSync, rmSync } from 'node:fs';
import { tmpdir } from 'node:os';
import { join } from 'node:path';
import { fileURLToPath } from 'node:url';
import { expect, it, onTestFinished } from 'vitest';

const binding = fileURLToPath(new URL('../../../../build/data-plane/kvtier_data_plane.node', import.meta.url));
const options = { topic: '', ipv6: false, heartbeatMs: 5_000, serverKey: '', publicKey: '', secretKey: '' };

/** What a program prints that finds this library first. */
function beside(source: string, program: (folder: string) => string): { stdout: string; stderr: string } {
  const folder = mkdtempSync(join(tmpdir(), 'kvtier-zeromq-'));
  onTestFinished(() => rmSync(folder, { recursive: true }));
  const library = join(folder, 'zeromq.node');
  const file = fileURLToPath(new URL(`../cc/test/${source}`, import.meta.url));
  const build = spawnSync('g++', ['-std=c++20', '-shared', '-fPIC', file, '-o', library]);
  expect(build.stderr.toString()).toBe('');
  const whole = `require(${JSON.stringify(library)}); const native = require(${JSON.stringify(binding)}); ${program(folder)}`;
  const { stdout, stderr } = spawnSync(process.execPath, ['-e', whole], { encoding: 'utf8', timeout: 60_000 });
  return { stdout, stderr };
}

it('its own number of sockets is kept, and one context serves all', () => {
  const endpoint = 'tcp://127.0.0.1:1';
  const { stdout, stderr } = beside(
    'clipping_zeromq.cc',
    () => `
      const options = ${JSON.stringify({ ...options, endpoint, highWaterMark: 1, maxMessageBytes: 1 })};
      for (let i = 0; i < 2; i++) {
        try { native.kvEventsOpen(options); } catch (error) { console.error(error.message); }
      }`,
  );
  expect(stderr).toBe('socket: no socket\nsocket: no socket\n');
  expect(stdout).toBe('context\n6208 refused\n3104 refused\n1552 refused\n');
});

it('a call that a signal breaks off is made again: all messages come, and the connection’s end is told', () => {
  const { stdout, stderr } = beside('interrupting_zeromq.cc', (folder) => {
    const endpoint = `ipc://${folder}/pub`;
    return `
      const { XPublisher } = require('zeromq');
      (async () => {
        const publisher = new XPublisher({ linger: 0 });
        await publisher.bind(${JSON.stringify(endpoint)});
        const events = native.kvEventsOpen(${JSON.stringify({ ...options, endpoint, highWaterMark: 0, maxMessageBytes: 64 })});
        const next = () => native.kvEventsNext(events, null, false);
        const { handshakes } = await next();
        await publisher.receive(); // the subscription
        let messages = 0;
        for (let i = 0; i < 100; i++) await publisher.send(['topic', Buffer.from([0, 0, 0, 0, 0, 0, 0, i]), 'payload']);
        while (messages < 100) messages += (await next()).messages;
        publisher.close();
        const { disconnects } = await next();
        console.log(handshakes, messages, disconnects);
        native.kvEventsClose(events);
      })();`;
  });
  expect(stderr).toBe('');
  expect(stdout).toBe('1 100 1\n');
});
