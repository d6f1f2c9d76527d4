/** A place that somebody else takes while a key is renewed. Real sockets: sockets.test.ts. */

import { expect, it } from 'vitest';
import type { Socket } from 'zeromq';
import { BoundSockets } from './bound-sockets.ts';

const curve = { secretKey: 'D:)Q[IlAW!ahhC2ac:9*A}h:p?([4%wOTJ%JR%cs', allowedClientKeys: [] };

/** `taken`: how often somebody else has its place. */
function socketOf(calls: string[], taken: number): Socket {
  let left = taken;
  const socket = {
    unbind: async () => void calls.push('unbind'),
    bind: async () => {
      calls.push('bind');
      if (left-- > 0) throw Object.assign(new Error('in use'), { code: 'EADDRINUSE' });
    },
  };
  return socket as unknown as Socket;
}

it('is told once, and tried again until it is free; the others follow', async () => {
  const [first, second, told]: [string[], string[], string[]] = [[], [], []];
  const sockets = [
    { socket: socketOf(first, 2), endpoint: 'tcp://127.0.0.1:1' },
    { socket: socketOf(second, 0), endpoint: 'tcp://127.0.0.1:2' },
  ];
  await new BoundSockets(sockets, curve, ({ message }) => told.push(message)).renew();
  expect(first).toEqual(['unbind', 'bind', 'unbind', 'bind', 'unbind', 'bind']);
  expect(second).toEqual(['unbind', 'bind']);
  expect(told).toEqual(['tcp://127.0.0.1:1: in use by another process; choose another']);
  expect(sockets[1]!.socket).toMatchObject({ curveServer: true, curveSecretKey: curve.secretKey });
});

it('is left to others at the end', async () => {
  const calls: string[] = [];
  const bound = new BoundSockets([{ socket: socketOf(calls, 1_000), endpoint: 'tcp://127.0.0.1:1' }], curve, () => {});
  const renewed = bound.renew();
  await expect.poll(() => calls.length, { timeout: 20_000 }).toBeGreaterThanOrEqual(4);
  await bound.close();
  await renewed;
  // The thousandth try would have succeeded: it has given up before.
  expect(calls.filter((call) => call === 'bind').length).toBeLessThan(1_000);
});
