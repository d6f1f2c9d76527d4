/** Where the engines of one worker publish: what its record may say of them, and which addresses that means. */
import { expect, it } from 'vitest';
import { type EventSource, rankSources, workerRecordSchema } from './membership.ts';

const source = (endpoint: string, replayEndpoint: string | null = null): EventSource => ({
  ...{ endpoint, replayEndpoint, topic: 'kv' },
});

it('each of several ranks publishes at the port after the one before', () => {
  expect(rankSources(source('tcp://[fd00::1]:5557', 'tcp://[fd00::1]:5600'), 3)).toEqual([
    source('tcp://[fd00::1]:5557', 'tcp://[fd00::1]:5600'),
    source('tcp://[fd00::1]:5558', 'tcp://[fd00::1]:5601'),
    source('tcp://[fd00::1]:5559', 'tcp://[fd00::1]:5602'),
  ]);
  expect(rankSources(source('tcp://pod:65534'), 2)).toEqual([source('tcp://pod:65534'), source('tcp://pod:65535')]);
});

it.each([
  ['ipc:///run/events', null],
  ['tcp://pod', null],
  ['tcp://pod:65535', null],
  ['tcp://pod:5557', 'ipc:///run/replay'],
])('at %s, with replays at %s, there is no place for a second one', (endpoint, replayEndpoint) => {
  expect(rankSources(source(endpoint, replayEndpoint), 2)).toBeUndefined();
  const record = (ranks: number) => ({ name: 'a', address: 'http://a', events: { endpoint, replayEndpoint, ranks } });
  expect(workerRecordSchema.safeParse(record(1)).success).toBe(true);
  const issues = workerRecordSchema.safeParse(record(2)).error!.issues.map(({ path, message }) => [path, message]);
  const why = 'ranks: each publishes at the next port; give endpoints as tcp://HOST:PORT, with so many ports to 65535';
  expect(issues).toEqual([[['events'], why]]);
});

it.each([0, 65, 1.5])('a record with %d ranks is refused', (ranks) => {
  const record = { name: 'a', address: 'http://a', events: { endpoint: 'tcp://a:5557', ranks } };
  expect(workerRecordSchema.safeParse(record).error!.issues.map(({ path }) => path)).toEqual([['events', 'ranks']]);
});
