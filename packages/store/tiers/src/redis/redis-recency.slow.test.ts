/** Uses and reservations, as a real server gets them. */
import { createHash } from 'node:crypto';
import { type HashKey, namespaceFromDigest } from '@kvtier/identity';
import { expect, it, onTestFinished, vi } from 'vitest';
import { hashNamed, namespaceNamed } from '../kit/testing/objects.ts';
import { Directory } from './directory.ts';
import { chargeOf } from './script-pieces.ts';
import { sharedServer } from './testing/shared-server.ts';

const shared = sharedServer();
const base = 'kvtier:{p0}:';

it('every use is sent before a reservation, which evicts by it, however many wait', async () => {
  await shared.open({ bytes: 64 << 20 });
  const lua = `for i = 1, 9000 do
      local field = string.rep('n', 32) .. string.sub(redis.sha1hex(i), 1, 32)
      redis.call('HSET', '${base}blocks', field, '956 4096 n.' .. i)
      redis.call('ZADD', '${base}recency', i, field)
    end
    redis.call('HINCRBY', '${base}ledger', 'used', 9000 * ${chargeOf(956, 4096)})
    return redis.call('HINCRBY', '${base}ledger', 'count', 9000)`;
  expect(await shared.server.cli('eval', lua, '0')).toBe('9000');
  const tier = await shared.open({ bytes: 64 << 20 });
  const used = namespaceFromDigest(Buffer.alloc(32, 'n'));
  const hashes = Array.from({ length: 9000 }, (_, i) =>
    createHash('sha1')
      .update(`${i + 1}`)
      .digest('hex'),
  );
  const [touch, reserve] = [vi.spyOn(Directory.prototype, 'touch'), vi.spyOn(Directory.prototype, 'reserve')];
  onTestFinished(() => void vi.restoreAllMocks());
  let before = 0;
  reserve.mockImplementationOnce(function (this: Directory, ...args) {
    before = touch.mock.calls.reduce((sum, [uses]) => sum + uses.length, 0);
    return this.reserve(...args);
  });
  tier.touch(
    used,
    hashes.map((hash) => hash.slice(0, 32) as HashKey),
  );
  expect(await shared.bench.write(tier, namespaceNamed('one'), [hashNamed('new')], 20_000)).toEqual(['stored']);
  expect(before).toBe(9000);
});
