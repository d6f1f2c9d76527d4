/**
 * A way that takes longer: what comes in at one address goes on to another so many milliseconds later, and back as much. Kernels
 * without netem have no other. node slow-way.mjs LISTEN_HOST TARGET_HOST MS PORT...; writes "up" when it listens.
 */
import { once } from 'node:events';
import { connect, createServer } from 'node:net';

const [listenHost, targetHost, ms, ...ports] = process.argv.slice(2);
/** Under way in one direction of one connection; more is not read. */
const mostBytes = 16 << 20;

function later(from, to) {
  const waiting = [];
  let bytes = 0;
  let isTimed = false;
  const wake = (inMs) => {
    isTimed = true;
    setTimeout(give, inMs);
  };
  const give = () => {
    isTimed = false;
    while (waiting.length > 0 && waiting[0].atMs <= performance.now()) {
      const { chunk } = waiting.shift();
      if (chunk === null) to.end();
      else to.write(chunk);
      bytes -= chunk?.length ?? 0;
    }
    if (bytes < mostBytes && to.writableLength < mostBytes) from.resume();
    if (waiting.length > 0) wake(waiting[0].atMs - performance.now());
  };
  const take = (chunk) => {
    waiting.push({ atMs: performance.now() + Number(ms), chunk });
    bytes += chunk?.length ?? 0;
    if (bytes >= mostBytes || to.writableLength >= mostBytes) from.pause();
    if (!isTimed) wake(Number(ms));
  };
  from.on('data', take);
  from.on('end', () => take(null));
  from.on('error', () => to.destroy());
  from.on('close', () => !from.readableEnded && to.destroy());
  to.on('drain', () => from.resume());
}

for (const port of ports.map(Number)) {
  const server = createServer({ allowHalfOpen: true, noDelay: true }, (near) => {
    const far = connect({ host: targetHost, port, allowHalfOpen: true, noDelay: true });
    later(near, far);
    later(far, near);
  });
  await once(server.listen(port, listenHost), 'listening');
}
process.stdout.write('up\n');
