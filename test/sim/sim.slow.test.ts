/**
 * The smoke of the simulation, and that it can fail: the same seed lives the same life; many seeds keep all laws and were worth
 * living; typical defects, planted one by one, are found.
 */
import { expect, it } from 'vitest';
import { simulate } from './simulation.ts';

const seeds = Array.from({ length: 10 }, (_, at) => at + 1);
const steps = 1_500;

it('many worlds keep all laws, and everything happened in them', async () => {
  const tally: Record<string, number> = {};
  for (const seed of seeds) {
    const result = await simulate({ seed, steps });
    expect(
      result.failure,
      `npm run sim -- --seed ${seed} --steps ${steps}\n${result.lines.join('\n')}`,
    ).toBeUndefined();
    for (const [name, count] of Object.entries(result.tally)) tally[name] = (tally[name] ?? 0) + count;
  }
  // Only what is frequent: another draw of the same lives must not make this fail.
  const expected = [
    ...[
      'load.complete',
      'load.deadline',
      'load.missing',
      'load.awaited',
      'load.told to end',
      'abort',
      'engine.died',
      'engine.attached again',
      'session.in steps',
      'pin',
      'pin.with a ticket',
      'reserve.quota',
      'proof.blocks',
    ],
    ...['tier.disk.ready', 'tier.disk.refused', 'tier.redis.ready', 'tier.redis.refused', 'tier.peer.ready'],
    ...['tier.s3.ready', 'tier.s3.stored', 's3.conflicts', 'codec.compressed', 'codec.uncompressed'],
  ];
  expect(expected.filter((name) => (tally[name] ?? 0) === 0)).toEqual([]);
  const faults = Object.entries(tally).filter(([name]) => name.startsWith('fault.'));
  expect(faults.length).toBeGreaterThan(15); // kinds
  expect((tally['fault.kill'] ?? 0) + (tally['fault.power'] ?? 0)).toBeGreaterThan(0);
});

it.each([[32_067, 2_500, 'a key of Redis with more bytes than it is charged for']])(
  'the world of seed %i (%i steps), which found %s, keeps all laws',
  async (seed, many) => {
    expect((await simulate({ seed, steps: many })).failure).toBeUndefined();
  },
);

it('a file system without space, for files or for writes, takes no device out of service', async () => {
  const tally: Record<string, number> = {};
  // Ten lives meet it 34 to 67 times: twenty, so that it is not the draw that is judged.
  for (const seed of [...seeds, ...seeds.map((one) => seeds.length + one)]) {
    const result = await simulate({ seed, steps: 1_000, tiers: ['disk'], faults: ['disk full'] });
    expect(result.failure).toBeUndefined();
    for (const [name, count] of Object.entries(result.tally)) tally[name] = (tally[name] ?? 0) + count;
  }
  expect(tally['disk.enospc']).toBeGreaterThan(50);
  expect(tally['tier.disk.ready']).toBeGreaterThan(50);
  expect(tally['tier.disk.outages']).toBeUndefined();
});

it('a seed is a life: the same again, event by event, and another one for another seed', async () => {
  const [first, again, other] = [
    await simulate({ seed: 7, steps, verbose: true }),
    await simulate({ seed: 7, steps, verbose: true }),
    await simulate({ seed: 8, steps }),
  ];
  expect(again.lines).toEqual(first.lines);
  expect(again.digest).toBe(first.digest);
  expect(other.digest).not.toBe(first.digest);
});

it('what it exchanged of the platform is back', async () => {
  const before = [setTimeout, performance.now, Date.now, Math.random];
  await simulate({ seed: 1, steps: 200 });
  expect([setTimeout, performance.now, Date.now, Math.random]).toEqual(before);
});
