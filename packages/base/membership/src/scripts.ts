/**
 * What must happen at once in the list of members, as Lua. Three keys of one slot:
 *
 *     records   hash    "worker:NAME" or "node:NAME" → owner (32 hex digits) and the record (JSON)
 *     leases    zset    the same ids; until when they count, ms on the server's clock
 *     version   string  another word, never one that was, after each change of who is a member and what it says of itself
 *
 * Invariants, held by these scripts alone: a record whose lease has not ended is changed by its owner only; whatever readers can see
 * changes `version` or the number of leases that have not ended, so that a look at both tells whether there is anything to read.
 * A lease's end needs no writer.
 */
import { createHash } from 'node:crypto';
import { maxMembers } from '@kvtier/config';
import type { RedisScript } from '@kvtier/redis';

export const keyNames = ['records', 'leases', 'version'] as const;
/** Hex digits; a new one at each start of a member's process. */
export const ownerLength = 32;
/** `leaseMs` is not longer (`workerMembershipSchema` of @kvtier/config). */
const longestLeaseMs = 10_000;

const script = (lua: string): RedisScript => ({ lua, sha: createHash('sha1').update(lua).digest('hex') });

const core = `
local records, leases, version = KEYS[1], KEYS[2], KEYS[3]
local call = redis.call
local time = call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local function text(number) return string.format('%.0f', number) end
`;

/**
 * ARGV: id, owner, record, leaseMs, a word for \`version\`. → {'ok', end} · {'taken', end}: another owner's lease has not ended ·
 * {'full', 0}. end: of the lease, ms on the server's clock. What ended long ago goes; a lease that ends later than any can (the
 * clock has gone back, or another server's was ahead) is cut, so that its owner has to live.
 */
export const announceScript = script(`${core}
local id, owner, lease_ms = ARGV[1], ARGV[2], tonumber(ARGV[4])
local gone = call('ZRANGEBYSCORE', leases, '-inf', text(now - ${longestLeaseMs}), 'LIMIT', 0, 100)
for _, each in ipairs(gone) do
  call('ZREM', leases, each)
  call('HDEL', records, each)
end
local far = call('ZRANGEBYSCORE', leases, '(' .. text(now + ${longestLeaseMs}), '+inf', 'LIMIT', 0, 100)
for _, each in ipairs(far) do call('ZADD', leases, text(now + lease_ms), each) end
local held, ends = call('HGET', records, id), tonumber(call('ZSCORE', leases, id) or 0)
local lives = held and ends > now
if lives and string.sub(held, 1, ${ownerLength}) ~= owner then return {'taken', text(ends)} end
if not lives and call('ZCOUNT', leases, '(' .. text(now), '+inf') >= ${maxMembers} then return {'full', '0'} end
call('ZADD', leases, text(now + lease_ms), id)
if not lives or held ~= owner .. ARGV[3] then
  call('HSET', records, id, owner .. ARGV[3])
  call('SET', version, ARGV[5])
end
return {'ok', text(now + lease_ms)}
`);

/** ARGV: id, owner, a word for `version`. The owner's record goes at once. → 1: it was there; 0: it was not, or another's. */
export const removeScript = script(`${core}
local held = call('HGET', records, ARGV[1])
if not held or string.sub(held, 1, ${ownerLength}) ~= ARGV[2] then return 0 end
call('HDEL', records, ARGV[1])
call('ZREM', leases, ARGV[1])
call('SET', version, ARGV[3])
return 1
`);

/**
 * ARGV: the version and the number of leases that are known. → {version, number, now}, and where one of the first two is another: ids,
 * and what \`records\` has of each (owner and record).
 */
export const readScript = script(`${core}
local held, after = call('GET', version) or '', '(' .. text(now)
local count = call('ZCOUNT', leases, after, '+inf')
if held == ARGV[1] and count == tonumber(ARGV[2]) then return {held, count, now} end
local ids = call('ZRANGEBYSCORE', leases, after, '+inf', 'LIMIT', 0, ${maxMembers})
return {held, count, now, ids, #ids == 0 and {} or call('HMGET', records, unpack(ids))}
`);
