/** A process that is nothing but a member: see `startMember`. */
import { workerRecordSchema } from '@kvtier/config';
import { announceWorker } from '../index.ts';

const { redis, name } = JSON.parse(process.argv[2]!) as {
  redis: Parameters<typeof announceWorker>[1]['redis'];
  name: string;
};
const say = (_: object, line: string): void => {
  if (line === 'announced to the cluster') process.stdout.write('announced\n');
};
const record = workerRecordSchema.parse({ name, address: '127.0.0.1:1' });
announceWorker(record, { redis, leaseMs: 1_500, log: { info: say, warn: say, error: say } });
