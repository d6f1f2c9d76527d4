/** Until when an Attach must have come: by what was sent, not by when a process that stood still gets to read it. */
import { type Clock, systemClock } from '@kvtier/runtime';
import { expect, it, onTestFinished, vi } from 'vitest';
import { ServedBench } from './testing/served-bench.ts';

const attachDeadlineMs = 12_345;
const patience = { timeout: 20_000, interval: 1 };

/** `late`: the deadline of the connection that began last is over. */
async function served() {
  const rig = new ServedBench();
  onTestFinished(() => rig.close());
  let late = (): void => {};
  const clock: Clock = {
    ...systemClock,
    after: (delayMs, run) => {
      if (delayMs !== attachDeadlineMs) return systemClock.after(delayMs, run);
      late = run;
      return () => {
        late = () => {};
      };
    },
  };
  rig.more = { clock };
  await rig.start({ attachDeadlineMs, goodbyeMs: 10 });
  const client = await rig.connect();
  await vi.waitUntil(() => rig.server!.sessions === 1, patience);
  return { rig, client, late: () => late() };
}

/** As a timer's: then sockets are read, and then immediates are called. */
const inTimers = <T>(run: () => T): Promise<T> => new Promise((resolve) => setTimeout(() => resolve(run()), 0));

it('an Attach that was sent in time, and lies unread when its deadline is over, is answered', async () => {
  const { client, late } = await served();
  const attached = await inTimers(() => {
    const answer = client.attach();
    late();
    return { answer };
  });
  expect((await attached.answer).session.length).toBe(16);
});

it('a session whose Attach did not come is told so, and ends', async () => {
  const { rig, client, late } = await served();
  await inTimers(late);
  await client.ended;
  expect(rig.bench.store.counters.get('session.failed.PROTOCOL')).toBe(1);
  await vi.waitUntil(() => rig.server!.sessions === 0, patience);
});
