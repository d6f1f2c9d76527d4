/**
 * Pieces that the scripts of scripts.ts are made of, in Lua. A script has those that it needs and no other: what a piece makes
 * (functions, tables) is made anew in each call, and costs the server as much as a block does.
 *
 * Lua's strings and calls are what a script costs its server, which does nothing else meanwhile: what comes together (the blocks of
 * a batch, their lease, the news of them) is one string, and is taken apart only where it must be.
 */

import { headerBytes } from '@kvtier/identity';
import { maxIdLength, maxParts, maxValueBytes } from './replies.ts';

const formatNumber = 2;
/** `format` of the ledger: another one is not ours to touch. */
export const formatName = `kvtier-redis-${formatNumber}`;
/** Said of a ledger ("… has format …"): a newer program's. */
export const isNewerFormat = (line: string): boolean =>
  Number(/ has format kvtier-redis-(\d{1,9})$/.exec(line)?.[1] ?? 0) > formatNumber;
/** Events kept for those who follow; who is further behind lists anew. One is what one script changed. */
export const maxEvents = 10_000;
/** Charged on top of a value's bytes: the entry's keys and fields, and those of each part. */
const entryBytes = 640;
const partOverheadBytes = 160;

/** What a value of `bytes` counts against the budget. The Lua below says the same. */
export function chargeOf(bytes: number, partBytes: number): number {
  return bytes + entryBytes + Math.ceil(bytes / partBytes) * partOverheadBytes;
}

const smallestCap = (1 << 20) / 256;

/** The ledger: its numbers are read once; lists of words, and one command for a whole list. */
export const core = `
local ledger, blocks, recency, leases, expiry, events = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local call, pcall = redis.call, redis.pcall
local sub, match, gmatch, char, concat = string.sub, string.match, string.gmatch, string.char, table.concat
local ledger_now = call('HMGET', ledger, 'format', 'epoch', 'used', 'cap', 'count', 'events', 'clock', 'skew', 'lost', 'at')
-- Numbers of the ledger are ours, unless somebody else wrote there.
local function whole(text, most)
  local value = tonumber(text or 0)
  if value and value >= 0 and value <= most and value % 1 == 0 then return value end
end
local format, epoch = ledger_now[1], ledger_now[2]
local used, cap, count, number = whole(ledger_now[3], 2^53), whole(ledger_now[4], 2^53), whole(ledger_now[5], 2^53), whole(ledger_now[6], 2^53)
-- Less than any configuration allows (1 MiB for 256 partitions): nothing would ever fit.
if cap and cap < ${smallestCap} then cap = nil end
local is_sound = epoch and used and cap and count and number
used, cap, count, number = used or 0, cap or 0, count or 0, number or 0
-- Entries that were none and are gone: what they were charged is not known. Too many, and the budget is no budget any more.
local lost = whole(ledger_now[9], 2^53) or 0
local at_us = whole(ledger_now[10], 2^53) or 0 -- when the last event was made
is_sound = is_sound and lost * 16 <= count + 16
local time = call('TIME')
local now, now_us = time[1] * 1000 + math.floor(time[2] / 1000), time[1] * 1000000 + time[2]
-- The clock of recency and leases goes on where the server's own is set back: skew is how far that has been, all together.
local latest_us, skew = whole(ledger_now[7], 3e15) or 0, whole(ledger_now[8], 1e15) or 0
if now_us + skew < latest_us then skew = latest_us - now_us end
now_us = now_us + skew
local function add(list, word) list[#list + 1] = word end
local function add_pair(list, first, second)
  local size = #list
  list[size + 1], list[size + 2] = first, second
end
-- A name, up to two words, the list. Lua cannot pass more than a few thousand arguments.
local function over(list, name, a, b)
  for first = 1, #list, 1200 do
    local last = math.min(first + 1199, #list)
    if b then call(name, a, b, unpack(list, first, last))
    elseif a then call(name, a, unpack(list, first, last))
    else call(name, unpack(list, first, last)) end
  end
end
-- Entries by field; false: none.
local function entries_of(fields)
  if #fields == 0 then return {} end
  if #fields <= 1000 then return call('HMGET', blocks, unpack(fields)) end
  local entries = {}
  for first = 1, #fields, 1000 do
    for _, entry in ipairs(call('HMGET', blocks, unpack(fields, first, math.min(first + 999, #fields)))) do add(entries, entry) end
  end
  return entries
end
`;

/**
 * A call costs the server some microseconds, whatever it does: so what changes is noted, and done for all blocks of a script at once,
 * by flush().
 */
export const changes = `
local node, charges, changed = '', {}, false
local news_kind, news_fields, news_entries
local dead_keys, dead_bytes, dead_fields, dead_leases = {}, {}, {}, {}
local new_keys, new_bytes, new_leases, new_blocks, new_uses, new_ends = {}, {}, {}, {}, {}, {}
-- The keys and the ledger change together, here and nowhere else. Returns the names and the entries of the news, as its event has them.
local function flush()
  if #dead_keys + #new_keys > 0 then
    -- While a slot of a Cluster moves, its servers refuse whatever names a key that they do not have (TRYAGAIN). Asked before anything
    -- is changed, so that a script does all of it or nothing; with the ledger, because one key alone would not be refused.
    for _, list in ipairs({dead_keys, new_keys}) do
      for first = 1, #list, 1200 do
        local there = pcall('EXISTS', ledger, unpack(list, first, math.min(first + 1199, #list)))
        if type(there) ~= 'number' then error('KVTIER TRYAGAIN: the slot is on its way to another server') end
      end
    end
    -- A key becomes another's only if no more bytes belong into it: what lies under the ledger is never more than the ledger says.
    -- What a server has dropped by itself, or refuses to rename, is made anew.
    local dead, empty = {}, {}
    for i = 1, math.max(#dead_keys, #new_keys) do
      local old, new = dead_keys[i], new_keys[i]
      local renamed = old and new and dead_bytes[i] <= new_bytes[i] and pcall('RENAME', old, new)
      if not renamed or renamed.err then
        if old then add(dead, old) end
        if new then add_pair(empty, new, '') end
      end
    end
    over(dead, 'DEL')
    over(empty, 'MSET')
    dead_keys, dead_bytes, new_keys, new_bytes = {}, {}, {}, {}
  end
  over(dead_leases, 'ZREM', leases)
  over(dead_fields, 'HDEL', blocks)
  over(dead_fields, 'ZREM', recency)
  over(dead_fields, 'ZREM', expiry)
  over(new_leases, 'ZADD', leases)
  over(new_blocks, 'HSET', blocks)
  -- Never used less recently than is known already.
  over(new_uses, 'ZADD', recency, 'GT')
  over(new_ends, 'ZADD', expiry)
  dead_leases, dead_fields, new_leases, new_blocks, new_uses, new_ends = {}, {}, {}, {}, {}, {}
  local fields, entries = '', ''
  if news_kind then
    number, fields, entries = number + 1, concat(news_fields), concat(news_entries, '\\n')
    -- The time tells this event from another of its number, after a failover to older data. A stream that takes none is not as we left
    -- it: it begins anew with this one, and who does not know the one before lists anew.
    local id = string.format('%d-%d', number, now_us)
    local added = pcall('XADD', events, 'MAXLEN', '~', ${maxEvents}, id, 'n', node, news_kind, fields, 'e', entries)
    if type(added) == 'table' and added.err then
      call('DEL', events)
      call('XADD', events, id, 'n', node, news_kind, fields, 'e', entries)
    end
    news_kind, at_us = nil, now_us
  end
  if changed then
    call('HSET', ledger, 'used', math.max(0, used), 'count', math.max(0, count), 'events', number, 'clock', now_us, 'skew', skew, 'lost', lost, 'at', at_us)
    for namespace, amount in pairs(charges) do
      if amount ~= 0 then
        local summed = pcall('HINCRBY', ledger, 'ns:' .. namespace, amount)
        if type(summed) == 'table' then call('HSET', ledger, 'ns:' .. namespace, math.max(0, amount)) end -- it was no number
      end
    end
    charges, changed = {}, false
  end
  return fields, entries
end
local function finish()
  flush()
  return {epoch, math.max(0, used), cap, number, now_us, at_us}
end
`;

/** Used at some time of the server's clock, which is not in the future. */
export const uses = `
local latest = now_us + 1000000
local function use(field, at)
  add_pair(new_uses, tonumber(at) <= latest and at or string.format('%d', latest), field)
  changed = true -- the clock is noted with it
end
`;

/** Values and what they are charged; blocks that go. gone: names dropped by this script. */
export const values = `
local value_base, gone = sub(ledger, 1, -7) .. 'v:', {}
-- What all values of a size have in common, by "bytes part": most blocks of a script are of one. nil: no value is of it.
local shapes = {}
local function shape_of(size)
  local shape = shapes[size]
  if shape then return shape end
  local bytes, part = match(size, '^(%d+) (%d+)$')
  bytes, part = tonumber(bytes), tonumber(part)
  local parts = part > 0 and math.ceil(bytes / part) or 0
  if bytes < ${headerBytes} or bytes > ${maxValueBytes} or parts < 1 or parts > ${maxParts} then return end
  shape = {charge = bytes + ${entryBytes} + parts * ${partOverheadBytes}, parts = parts}
  for i = 1, parts do
    shape[i] = math.min(part, bytes - (i - 1) * part)
  end
  shapes[size] = shape
  return shape
end
-- Of a value's parts. Numbers become text slowly.
local suffixes = {':0', ':1', ':2', ':3', ':4', ':5', ':6', ':7'}
local function key_of(id, i)
  local suffix = suffixes[i]
  if not suffix then
    suffix = ':' .. (i - 1)
    suffixes[i] = suffix
  end
  return value_base .. id .. suffix
end
local function add_keys(keys, sizes, shape, id)
  local at = #keys
  for i = 1, shape.parts do
    keys[at + i], sizes[at + i] = key_of(id, i), shape[i]
  end
end
local function charge(namespace, amount)
  used = used + amount
  charges[namespace] = (charges[namespace] or 0) + amount
  changed = true
end
-- 's', stored, or 'r', removed: of one kind are all news of a flush.
local function tell(kind, field, entry)
  if not news_kind then news_kind, news_fields, news_entries = kind, {}, {} end
  add_pair(news_fields, char(#field), field)
  add(news_entries, entry)
  changed = true
end
-- Of an entry's text, "bytes part id": "bytes part" and the id; nil: it is none, somebody else wrote it (replies.ts: the same rules).
local function parsed(entry)
  local size, id = match(entry, '^([1-9]%d* [1-9]%d*) ([%w_.-]+)$')
  if size and #size <= 31 and #id <= ${maxIdLength} and shape_of(size) then return size, id end
end
-- Its keys go, and its charge.
local function drop_value(field, size, id)
  local shape = shape_of(size)
  add_keys(dead_keys, dead_bytes, shape, id)
  charge(sub(field, 1, 32), -shape.charge)
end
local function drop(field, entry)
  local size, id = parsed(entry)
  gone[field] = true
  add(dead_fields, field)
  count = count - 1
  changed = true
  -- What is no entry has no keys that we know. Nodes may still list the block as it was before: whatever it was, it is gone.
  local is_name = #field == 48 or #field == 64
  if not size or not is_name then
    lost = lost + 1
    if is_name then tell('r', field, '-') end
    return
  end
  drop_value(field, size, id)
  tell('r', field, entry)
end
-- Fields, each behind a byte with its length.
local function fields_in(text)
  local list, at, size = {}, 1, #text
  while at <= size do
    local last = at + string.byte(text, at)
    list[#list + 1] = sub(text, at + 1, last)
    at = last + 1
  end
  return list
end
-- The lease of a batch: "part id bytes id bytes ...", a line feed, its fields.
local function lease_of(part, words, fields) return part .. ' ' .. words .. '\\n' .. fields end
`;

/** Blocks that have ended and go in one call, at most. */
export const sweptBlocks = 64;

/** What has ended by itself goes: so many leases, so many blocks at most. */
export const sweep = `
for _, lease in ipairs(call('ZRANGEBYSCORE', leases, '-inf', math.floor(now_us / 1000), 'LIMIT', 0, 4)) do
  local part, words, fields = match(lease, '^(%d+) ([^\\n]*)\\n(.*)$')
  local names, i = fields_in(fields or ''), 0
  for id, bytes in gmatch(words or '', '(%S+) (%S+)') do
    i = i + 1
    local size, name = parsed(bytes .. ' ' .. part .. ' ' .. id)
    if size and names[i] then drop_value(names[i], size, name) end
  end
  add(dead_leases, lease)
  changed = true
end
local ended = call('ZRANGEBYSCORE', expiry, '-inf', now, 'LIMIT', 0, ${sweptBlocks})
for i, entry in ipairs(entries_of(ended)) do
  if entry then drop(ended[i], entry) else call('ZREM', expiry, ended[i]) end
end
if changed then flush() end
`;

/** What is used least recently. */
export const eviction = `
-- By recency, read a few at a time: what flush() has not removed yet keeps its place. Those before first are gone.
local aged, aged_entries, first, stride = {}, {}, 1, 16
local function age(i)
  local field = aged[i]
  if field or i <= #aged then return field end
  local fields = call('ZRANGE', recency, #aged, #aged + stride - 1)
  local entries = entries_of(fields)
  for at, name in ipairs(fields) do
    aged[#aged + 1] = name
    aged_entries[#aged] = entries[at]
  end
  return aged[i]
end
-- Its name and its entry; of one namespace (or nil): looked for among the oldest only, so that a script stays short.
local function oldest_of(namespace)
  local oldest = age(first)
  while oldest and gone[oldest] do
    first = first + 1
    oldest = age(first)
  end
  for i = first, first + 1023 do
    local field = age(i)
    if not field then return end
    local is_it = not namespace or sub(field, 1, 32) == namespace
    if is_it and not gone[field] then
      if aged_entries[i] then return field, aged_entries[i] end
      gone[field] = true -- a name without an entry
      add(dead_fields, field)
    end
  end
end
`;

/**
 * A server that is out of memory, or may not write, refuses the first write of a script and lets deletions pass: this one comes
 * first, so that such a script changes nothing at all.
 */
export const mayWrite = `
call('HINCRBY', ledger, 'events', 0)
`;
/** Else the server has forgotten some of what was there. */
export const needsLedger = `
if format ~= '${formatName}' or not is_sound or call('HLEN', blocks) ~= count then return redis.error_reply('KVTIER lost') end
`;
