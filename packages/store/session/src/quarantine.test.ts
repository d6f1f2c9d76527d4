/** When quarantined slots come back: the process dead, settled, or never to be seen. */
import { Counters, type Holdings } from '@kvtier/placement';
import { ManualClock, silent } from '@kvtier/placement/testing';
import { expect, it } from 'vitest';
import type { PeerProcess } from './peer-process.ts';
import { peerProcess } from './peer-process.ts';
import { Quarantine } from './quarantine.ts';

function setUp() {
  const clock = new ManualClock();
  const counters = new Counters();
  const quarantine = new Quarantine({ clock, counters, log: silent, pollMs: 100 });
  const ended: string[] = [];
  const add = (session: string, peer: PeerProcess, isHeld: (() => boolean) | null = null): void =>
    quarantine.add(session, { counts: {}, end: () => ended.push(session) } as unknown as Holdings, peer, isHeld);
  return { clock, quarantine, ended, add };
}

it('a process that lives keeps its slots until it says that they are settled', () => {
  const { clock, quarantine, ended, add } = setUp();
  const self = peerProcess(process.pid);
  add('one', self);
  for (let i = 0; i < 2_000; i++) clock.advance(100);
  expect(ended).toEqual([]);
  expect(quarantine.lift('one', peerProcess(process.ppid))).toBe(false);
  expect(quarantine.lift('one', self)).toBe(true);
  expect(ended).toEqual(['one']);
  quarantine.close();
});

it('a process that is gone, or whose pid is another one now, gives them back at the next poll', () => {
  const { clock, quarantine, ended, add } = setUp();
  add('reused pid', { pid: process.pid, startTicks: '1' });
  clock.advance(100);
  expect(ended).toEqual(['reused pid']);
  expect(clock.pending).toBe(0);
  quarantine.close();
});

it('a process of another pid namespace gives them back after a minute', () => {
  const { clock, quarantine, ended, add } = setUp();
  add('unseen', { pid: 0, startTicks: '' });
  for (let i = 0; i < 599; i++) clock.advance(100);
  expect(ended).toEqual([]);
  clock.advance(100);
  expect(ended).toEqual(['unseen']);
  quarantine.close();
});

it('where a lock is held its end counts alone, whatever can be seen of processes', () => {
  const { clock, quarantine, ended, add } = setUp();
  let held = true;
  add('unseen', { pid: 0, startTicks: '' }, () => held);
  add('whose workers live on', { pid: process.pid, startTicks: '1' }, () => held);
  for (let i = 0; i < 2_000; i++) clock.advance(100);
  expect(ended).toEqual([]);
  held = false;
  clock.advance(100);
  expect(ended).toEqual(['unseen', 'whose workers live on']);
  quarantine.close();
});

it('a node that closes gives back nothing, and looks at nobody any more', () => {
  const { clock, quarantine, ended, add } = setUp();
  add('one', peerProcess(process.pid));
  add('whose process is gone', { pid: process.pid, startTicks: '1' });
  quarantine.close();
  clock.advance(100);
  expect([ended, clock.pending, quarantine.size]).toEqual([[], 0, 0]);
});
