/**
 * What must happen at once, as Lua: the budget, the directory, recency and expiry of one partition. A script touches the keys of
 * its partition only (one hash tag, one server), so that each is atomic in a Cluster, too. Formats: docs/formats.md ("Redis").
 *
 * Invariants, held by these scripts alone, whatever nodes do or die of:
 *  - `used` is the sum of the charges of all entries and all leases; it is never above `cap`;
 *  - a value's keys exist only under an entry or a lease: a lease makes them (empty), nodes may only replace what exists (SET XX),
 *    so that a writer that wakes up after its lease has expired finds nothing to write to;
 *  - an entry is written only when all bytes of its value are there.
 */
import { createHash } from 'node:crypto';

export interface Script {
  readonly lua: string;
  readonly sha: string;
}

/** The keys of a partition, in the order of KEYS. */
export const keyNames = ['ledger', 'blocks', 'recency', 'leases', 'expiry', 'events'] as const;
/** `format` of the ledger: another one is not ours to touch. */
export const formatName = 'kvtier-redis-1';
/** Events kept for those who follow; who is further behind lists anew. */
export const maxEvents = 20_000;
/** Charged on top of a value's bytes: the entry's keys and fields, and those of each part. */
const entryBytes = 640;
const partOverheadBytes = 160;

/** What a value of `bytes` counts against the budget. The Lua below says the same. */
export function chargeOf(bytes: number, partBytes: number): number {
  return bytes + entryBytes + Math.ceil(bytes / partBytes) * partOverheadBytes;
}

const prelude = `
local ledger, blocks, recency, leases, expiry, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local base = string.sub(ledger, 1, -7)
local call = redis.call
-- The ledger's numbers are read once and written once, by finish(): a call costs the server a microsecond or two.
local format, epoch, used, cap, count, number
local charges, changed = {}, false
local function load()
  local t = call('HMGET', ledger, 'format', 'epoch', 'used', 'cap', 'count', 'events')
  format, epoch = t[1], t[2]
  used, cap, count, number = tonumber(t[3] or 0), tonumber(t[4] or 0), tonumber(t[5] or 0), tonumber(t[6] or 0)
end
local function finish()
  if changed then call('HSET', ledger, 'used', used, 'count', count, 'events', number) end
  for namespace, amount in pairs(charges) do
    if amount ~= 0 then call('HINCRBY', ledger, 'ns:' .. namespace, amount) end
  end
  return {epoch, used, cap, number}
end
local function charged(namespace)
  return tonumber(call('HGET', ledger, 'ns:' .. namespace) or 0) + (charges[namespace] or 0)
end
local time = call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local now_us = time[1] * 1000000 + time[2]
local function parts_of(bytes, part) return math.ceil(bytes / part) end
local function charge_of(bytes, part) return bytes + ${entryBytes} + parts_of(bytes, part) * ${partOverheadBytes} end
-- "bytes part id"
local function parse(entry)
  local bytes, part, id = string.match(entry, '^(%d+) (%d+) (.+)$')
  return tonumber(bytes), tonumber(part), id
end
-- Its keys, empty. Lua cannot pass more than a few thousand arguments.
local function make_value(bytes, part, id)
  local count = parts_of(bytes, part)
  for first = 0, count - 1, 1000 do
    local pairs = {}
    for i = first, math.min(first + 1000, count) - 1 do
      pairs[#pairs + 1] = base .. 'v:' .. id .. ':' .. i
      pairs[#pairs + 1] = ''
    end
    call('MSET', unpack(pairs))
  end
end
-- Bytes in its keys; a key that is no string has none.
local function bytes_of(bytes, part, id)
  local there = 0
  for i = 0, parts_of(bytes, part) - 1 do
    local length = redis.pcall('STRLEN', base .. 'v:' .. id .. ':' .. i)
    if type(length) == 'number' then there = there + length end
  end
  return there
end
local function drop_value(bytes, part, id)
  local keys = {}
  for i = 0, parts_of(bytes, part) - 1 do keys[#keys + 1] = base .. 'v:' .. id .. ':' .. i end
  call('DEL', unpack(keys))
end
local function charge(field, amount)
  local namespace = string.sub(field, 1, 32)
  used = used + amount
  charges[namespace] = (charges[namespace] or 0) + amount
  changed = true
end
local function tell(kind, field, entry, node)
  number = number + 1
  changed = true
  local id = string.format('%.0f-1', number)
  call('XADD', events, 'MAXLEN', '~', ${maxEvents}, id, 'k', kind, 'f', field, 'e', entry, 'n', node)
end
-- Used at that time of the server's clock; never less recently than is known already, nor in the future.
local function use(field, at)
  call('ZADD', recency, 'GT', string.format('%.0f', math.min(tonumber(at), now_us + 1000000)), field)
end
local function drop(field, entry, node)
  local bytes, part, id = parse(entry)
  drop_value(bytes, part, id)
  call('HDEL', blocks, field)
  call('ZREM', recency, field)
  call('ZREM', expiry, field)
  count = count - 1
  charge(field, -charge_of(bytes, part))
  tell('r', field, entry, node)
end
-- Of a lease's member, "bytes part id field", that is taken from the leases.
local function give_back(member)
  local bytes, part, id, field = string.match(member, '^(%d+) (%d+) (%S+) (.+)$')
  drop_value(tonumber(bytes), tonumber(part), id)
  charge(field, -charge_of(tonumber(bytes), tonumber(part)))
end
local function sweep(node, limit)
  for _, member in ipairs(call('ZRANGEBYSCORE', leases, '-inf', now, 'LIMIT', 0, limit)) do
    call('ZREM', leases, member)
    give_back(member)
  end
  for _, field in ipairs(call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, limit)) do
    local entry = call('HGET', blocks, field)
    if entry then drop(field, entry, node) else call('ZREM', expiry, field) end
  end
end
local function lost() return format ~= '${formatName}' or call('HLEN', blocks) ~= count end
`;

/**
 * A server that is out of memory, or may not write, refuses the first write of a script and lets deletions pass: this one comes
 * first, so that such a script changes nothing at all.
 */
const mayWrite = `
call('HINCRBY', ledger, 'events', 0)
`;
const needsLedger = `
load()
if lost() then return redis.error_reply('KVTIER lost') end
`;

function script(body: string): Script {
  const lua = prelude + body;
  return { lua, sha: createHash('sha1').update(lua).digest('hex') };
}

/**
 * ARGV: partitions, cap, epoch, create ("1" or ""). → {status, epoch, used, cap, events}. status: 'ok'; 'new': there is no ledger
 * (and "create" was not asked for); 'damaged': the server has dropped keys; 'foreign: ...': keys of another program or format.
 * The cap of whoever starts last holds for all; a smaller one evicts, a thousand blocks a call.
 */
export const openScript = script(`
local types = {'hash', 'hash', 'zset', 'zset', 'zset', 'stream'}
for i, key in ipairs(KEYS) do
  local kind = call('TYPE', key).ok
  if kind ~= 'none' and kind ~= types[i] then return {'foreign: ' .. key .. ' is a ' .. kind} end
end
load()
if call('EXISTS', ledger) == 0 then
  if ARGV[4] == '' then return {'new'} end
  call('HSET', ledger, 'format', '${formatName}', 'partitions', ARGV[1], 'cap', ARGV[2], 'epoch', ARGV[3],
    'used', 0, 'count', 0, 'events', 0)
  load()
else
  if format ~= '${formatName}' then return {'foreign: ' .. ledger .. ' has format ' .. (format or 'none')} end
  local partitions = call('HGET', ledger, 'partitions')
  if partitions ~= ARGV[1] then return {'foreign: ' .. ledger .. ' was made for ' .. partitions .. ' partitions'} end
  if call('HLEN', blocks) ~= count or call('ZCARD', recency) ~= count then return {'damaged'} end
  cap = tonumber(ARGV[2])
  call('HSET', ledger, 'cap', ARGV[2])
  for _ = 1, 1000 do
    local field = used > cap and call('ZRANGE', recency, 0, 0)[1]
    if not field then break end
    drop(field, call('HGET', blocks, field), '')
  end
end
return {'ok', unpack(finish())}
`);

/**
 * ARGV: node, leaseMs, partBytes, namespace cap ("" for none), then for each block: field, id, bytes.
 * → {state, answers, evicted}: answers are 'r' (reserved), 'n' (no room), or the entry that is held already;
 * evicted is field, entry, field, entry ...
 */
export const reserveScript = script(`${needsLedger}${mayWrite}
sweep(ARGV[1], 64)
local part, share = tonumber(ARGV[3]), tonumber(ARGV[4])
local answers, evicted = {}, {}
local function evict(field)
  local entry = call('HGET', blocks, field)
  if not entry then call('ZREM', recency, field) return end
  drop(field, entry, ARGV[1])
  evicted[#evicted + 1] = field
  evicted[#evicted + 1] = entry
end
-- The least recently used of one namespace; looked for among the oldest only, so that a script stays short.
local function oldest_of(namespace)
  for at = 0, 3 do
    for _, field in ipairs(call('ZRANGE', recency, at * 256, at * 256 + 255)) do
      if string.sub(field, 1, 32) == namespace then return field end
    end
  end
end
for at = 5, #ARGV, 3 do
  local field, id, bytes = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local held = call('HGET', blocks, field)
  local need = charge_of(bytes, part)
  if held then
    use(field, now_us)
    answers[#answers + 1] = held
  else
    local fits = need <= cap and (not share or need <= share)
    local namespace = string.sub(field, 1, 32)
    while fits and share and charged(namespace) + need > share do
      local field = oldest_of(namespace)
      if field then evict(field) else fits = false end
    end
    while fits and used + need > cap do
      local field = call('ZRANGE', recency, 0, 0)[1]
      if field then evict(field) else fits = false end
    end
    if fits then
      charge(field, need)
      call('ZADD', leases, now + tonumber(ARGV[2]), bytes .. ' ' .. part .. ' ' .. id .. ' ' .. field)
      make_value(bytes, part, id)
      answers[#answers + 1] = 'r'
    else
      answers[#answers + 1] = 'n'
    end
  end
end
return {finish(), answers, evicted}
`);

/**
 * ARGV: node, ttlMs ("" for none), partBytes, then for each block: field, id, bytes, written ("1", or "" to give
 * the lease back), used (µs, the server's clock). → {state, answers}: 's' (stored), 'n' (not: the lease had expired, or bytes are missing), or the entry that
 * another node stored meanwhile.
 */
export const commitScript = script(`${needsLedger}${mayWrite}
local part, answers = tonumber(ARGV[3]), {}
for at = 4, #ARGV, 5 do
  local field, id, bytes = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
  local member = bytes .. ' ' .. part .. ' ' .. id .. ' ' .. field
  local answer = 'n'
  if call('ZREM', leases, member) == 1 then
    local written, held = ARGV[at + 3] ~= '', call('HGET', blocks, field)
    if not written or held or bytes_of(bytes, part, id) ~= bytes then
      give_back(member)
      if written and held then answer = held end
    else
      local entry = bytes .. ' ' .. part .. ' ' .. id
      call('HSET', blocks, field, entry)
      count = count + 1
      use(field, ARGV[at + 4])
      if ARGV[2] ~= '' then
        local at_ms = now + tonumber(ARGV[2])
        call('ZADD', expiry, at_ms, field)
        for i = 0, parts_of(bytes, part) - 1 do call('PEXPIREAT', base .. 'v:' .. id .. ':' .. i, at_ms) end
      end
      tell('s', field, entry, ARGV[1])
      answer = 's'
    end
  end
  answers[#answers + 1] = answer
end
return {finish(), answers}
`);

/** ARGV: node, then for each block: field, entry. Removes those that are still the same. → {state} */
export const removeScript = script(`${needsLedger}${mayWrite}
for at = 2, #ARGV, 2 do
  if call('HGET', blocks, ARGV[at]) == ARGV[at + 1] then drop(ARGV[at], ARGV[at + 1], ARGV[1]) end
end
return {finish()}
`);

/** ARGV: field, used (µs, the server's clock), field, used ... → {state} */
export const touchScript = script(`${needsLedger}${mayWrite}
for at = 1, #ARGV, 2 do
  if call('HEXISTS', blocks, ARGV[at]) == 1 then use(ARGV[at], ARGV[at + 1]) end
end
return {finish()}
`);

/**
 * ARGV: node, the last event known, most events to return. → {state, first, events}: first is the number of the oldest event
 * that is kept (0: none); events are XRANGE's. What has expired goes first.
 */
export const pollScript = script(`${needsLedger}
if type(redis.pcall('HINCRBY', ledger, 'events', 0)) == 'number' then sweep(ARGV[1], 64) end
local oldest = call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
local first = oldest and tonumber(string.match(oldest[1], '^(%d+)')) or 0
return {finish(), first, call('XRANGE', events, (ARGV[2] + 1) .. '-0', '+', 'COUNT', ARGV[3])}
`);

/** Everything of a partition but its values goes. ARGV: none. */
export const resetScript = script(`
return call('DEL', unpack(KEYS))
`);

export const allScripts = [
  openScript,
  reserveScript,
  commitScript,
  removeScript,
  touchScript,
  pollScript,
  resetScript,
] as const;
