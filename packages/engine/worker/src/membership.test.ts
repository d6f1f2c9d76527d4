/** What an engine worker says of itself. The list itself: membership.slow.test.ts of @kvtier/membership. */
import { engineWorkerSchema, parseConfig, type WorkerMembership } from '@kvtier/config';
import type { Logger } from '@kvtier/telemetry';
import { expect, it } from 'vitest';
import { joinCluster } from './membership.ts';

const { membership } = parseConfig(
  engineWorkerSchema,
  {
    ...{ modelDir: '/m', servedName: 'm', listen: 'unix:/e', cacheNodeSocket: null },
    membership: { redis: { servers: ['unix:/nowhere'] }, name: 'a' },
  },
  'test',
);
/** As no file could have it: the configuration refuses the same. */
const membershipOf = (change: object): WorkerMembership => ({ ...membership!, ...change });
const events = {
  ...{ endpoint: 'tcp://127.0.0.1:5557', replayEndpoint: 'tcp://*:5558', topic: 'kv@', serverKey: null },
  onServerKey: () => {},
};

it.each([
  ['address', {}, { address: '0.0.0.0:7000', events: null }, '0.0.0.0:7000'],
  ['address', { address: '[::]:7000' }, { address: 'unix:/e', events: null }, '[::]:7000'],
  ['events', {}, { address: 'unix:/e', events }, 'tcp://*:5558'],
])('refuses %s that nobody can connect to', (key, change, listening, place) => {
  expect(() => joinCluster(membershipOf(change), listening, {} as Logger)).toThrow(
    expect.objectContaining({
      code: 'CONFIG',
      message: `membership.${key}: ${place} is no address to connect to; give one that others reach`,
    }),
  );
});
