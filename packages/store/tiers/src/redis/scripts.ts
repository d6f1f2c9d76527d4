/**
 * What must happen at once, as Lua: the budget, the directory, recency and expiry of one partition. A script touches the keys of
 * its partition only (one hash tag, one server), so that each is atomic in a Cluster, too. Formats: docs/formats.md ("Redis").
 *
 * Invariants, held by these scripts alone, whatever nodes do or die of:
 *  - `used` is the sum of the charges of all entries and all leases; it is never above `cap`;
 *  - a value's keys exist only under an entry or a lease: a lease makes them, nodes may only replace what exists (SET XX), so that
 *    a writer that wakes up after its lease has expired finds nothing to write to. Keys of what is evicted for it become them
 *    (RENAME) where no more bytes belong into them: their old bytes are freed one by one, as new ones come. Freed by megabytes at
 *    once, they would go back to the kernel, and each page would be asked for and cleared again: a tenth of the server's time;
 *  - a script does all of what it is for, or nothing, or (several flushes) whole steps of it; also while its slot moves;
 *  - an entry is written only under a lease, when its writer says that the server took every part. What is in the keys proves
 *    nothing, a renamed one has its old bytes, and a server may drop one by itself: readers verify what they get.
 */
import { createHash } from 'node:crypto';
import { changes, core, eviction, formatName, mayWrite, needsLedger, sweep, uses, values } from './script-pieces.ts';

export interface Script {
  readonly lua: string;
  readonly sha: string;
}

/** The keys of a partition, in the order of KEYS. */
export const keyNames = ['ledger', 'blocks', 'recency', 'leases', 'expiry', 'events'] as const;
function script(...pieces: readonly string[]): Script {
  const lua = pieces.join('');
  return { lua, sha: createHash('sha1').update(lua).digest('hex') };
}

/** What every script that changes something begins with. */
const writing = [core, needsLedger, mayWrite, changes] as const;

/** Keys of ours, or none: else nothing is read. Another version's first: it may have keys of other types. */
const ownKeys = `
if redis.call('TYPE', KEYS[1]).ok == 'hash' then
  local format = redis.call('HGET', KEYS[1], 'format')
  if format and format ~= '${formatName}' then return {'foreign: ' .. KEYS[1] .. ' has format ' .. format} end
end
local types = {'hash', 'hash', 'zset', 'zset', 'zset', 'stream'}
for i, key in ipairs(KEYS) do
  local kind = redis.call('TYPE', key).ok
  if kind ~= 'none' and kind ~= types[i] then return {'foreign: ' .. key .. ' is a ' .. kind} end
end
`;
/** → {status}: 'ok': there is a ledger; 'new': there is none; 'foreign: ...' as of `openScript`. Nothing is changed. */
export const lookScript = script(
  ownKeys,
  `
return {redis.call('EXISTS', KEYS[1]) == 1 and 'ok' or 'new'}
`,
);

/**
 * A state is {epoch, used, cap, number of the last event, clock of recency in microseconds, when that event was made on it}.
 * ARGV: partitions, cap, epoch, create ("1" or ""). → {status, and for 'ok' the state and the whole id of the last event ('': none is kept)}. status: 'ok'; 'new': there is no ledger
 * (and "create" was not asked for); 'damaged': the server has dropped keys; 'foreign: ...': keys of another program or format. The
 * first two with the epoch of what is there.
 * The cap of whoever starts last holds for all; a smaller one evicts, a thousand blocks a call. A server that refuses writes can be read:
 * it is opened, and where it takes no other cap, it keeps the one that it has.
 */
export const openScript = script(
  ownKeys,
  core,
  changes,
  values,
  eviction,
  `
if call('EXISTS', ledger) == 0 then
  if ARGV[4] == '' then return {'new', ''} end
  call('HSET', ledger, 'format', '${formatName}', 'partitions', ARGV[1], 'cap', ARGV[2], 'epoch', ARGV[3],
    'used', 0, 'count', 0, 'events', 0)
  epoch, cap = ARGV[3], tonumber(ARGV[2])
else
  if format ~= '${formatName}' then return {'foreign: ' .. ledger .. ' has format ' .. (format or 'none')} end
  local partitions = call('HGET', ledger, 'partitions')
  if partitions ~= ARGV[1] then return {'foreign: ' .. ledger .. ' was made for ' .. (partitions or 'no') .. ' partitions'} end
  if not is_sound or call('HLEN', blocks) ~= count or call('ZCARD', recency) ~= count then return {'damaged', epoch or ''} end
  if cap ~= tonumber(ARGV[2]) then
    -- A server without memory lets a script write once it has deleted: here, what is not there. So that a smaller cap can free some.
    pcall('HDEL', ledger, '')
    if type(pcall('HSET', ledger, 'cap', ARGV[2])) == 'number' then cap = tonumber(ARGV[2]) end
  end
  for _ = 1, 1000 do
    if used <= cap then break end
    local field, entry = oldest_of()
    if not field then break end
    drop(field, entry)
  end
end
local state = finish()
local newest = call('XRANGE', events, number, number, 'COUNT', 1)[1]
return {'ok', state, newest and newest[1] or ''}
`,
);

/**
 * ARGV: node, leaseMs, partBytes, namespace cap ("" for none), fields (one after the other, each behind a byte with its length), and for
 * each block the words: id, bytes. → {state, answers, held, evicted fields, evicted entries}: a letter a block, 'r' (reserved), 'n' (no
 * room), 'h' (held already: the next of `held`); evicted entries have a line feed between them. In few pieces, because each
 * argument and each reply costs both sides a microsecond or so. What is reserved has one lease.
 */
export const reserveScript = script(
  ...writing,
  uses,
  values,
  eviction,
  `node = ARGV[1]`,
  sweep,
  `
local part, share = ARGV[3], tonumber(ARGV[4])
local fields, answers, others = fields_in(ARGV[5]), {}, {}
stride = math.max(2, #fields)
local held, taken = entries_of(fields), {}
for i, field in ipairs(fields) do
  if held[i] and not parsed(held[i]) then
    drop(field, held[i]) -- of somebody else's making: the block has none
    held[i] = false
  elseif held[i] then use(field, string.format('%d', now_us)) end
end
if changed then flush() end -- what is asked for is not the oldest any more
local function evict(namespace)
  local field, entry = oldest_of(namespace)
  if not field then return false end
  drop(field, entry)
  return true
end
local i = 0
for id, bytes in gmatch(ARGV[6], '(%S+) (%S+)') do
  i = i + 1
  local field, shape = fields[i], shape_of(bytes .. ' ' .. part)
  local need = shape.charge
  if held[i] and not gone[field] then
    answers[i] = 'h'
    add(others, held[i])
  else
    local fits = need <= cap and (not share or need <= share)
    local namespace = sub(field, 1, 32)
    if share then
      local charged = tonumber(call('HGET', ledger, 'ns:' .. namespace) or 0) or 0
      while fits and charged + (charges[namespace] or 0) + need > share do fits = evict(namespace) end
    end
    while fits and used + need > cap do fits = evict() end
    if fits then
      charge(namespace, need)
      add_keys(new_keys, new_bytes, shape, id)
      add_pair(taken, id .. ' ' .. bytes, char(#field) .. field)
      answers[i] = 'r'
    else
      answers[i] = 'n'
    end
  end
end
if #taken > 0 then
  local words, names = ARGV[6], ARGV[5]
  if #taken < 2 * #fields then
    local some_words, some_names = {}, {}
    for at = 1, #taken, 2 do
      add(some_words, taken[at])
      add(some_names, taken[at + 1])
    end
    words, names = concat(some_words, ' '), concat(some_names)
  end
  add_pair(new_leases, math.floor(now_us / 1000) + tonumber(ARGV[2]), lease_of(part, words, names))
end
local evicted, entries = flush()
return {{epoch, used, cap, number, now_us, at_us}, concat(answers), others, evicted, entries}
`,
);

/**
 * ARGV: node, times to live (words; ms, or '-' for none; "": no block has one), partBytes, fields, and for each block the words: id, bytes;
 * these as they were reserved, without what was not. Then whether each was written ("1", or "0": it is given back), and when each was used (words; µs, the server's clock).
 * → {state, answers, held}: a letter a block, 's' (stored), 'n' (not: the lease had expired, or it was not written), 'h' (another node
 * stored it meanwhile: the next of `held`).
 */
export const commitScript = script(
  ...writing,
  uses,
  values,
  `
node = ARGV[1]
local part, answers, others = ARGV[3], {}, {}
local fields, flags, lease = fields_in(ARGV[4]), ARGV[6], lease_of(ARGV[3], ARGV[5], ARGV[4])
if not call('ZMSCORE', leases, lease)[1] then return {finish(), string.rep('n', #fields), others} end
local used_at, lives = gmatch(ARGV[7], '%S+'), gmatch(ARGV[2], '%S+')
local held, stored, i = entries_of(fields), {}, 0
add(dead_leases, lease)
for id, bytes in gmatch(ARGV[5], '(%S+) (%S+)') do
  i = i + 1
  local field, size, written, at = fields[i], bytes .. ' ' .. part, sub(flags, i, i) == '1', used_at()
  local ttl = tonumber(lives() or '')
  local other = held[i] or stored[field]
  if not written or other then
    drop_value(field, size, id)
    answers[i] = 'n'
    if written then
      answers[i] = 'h'
      add(others, other)
    end
  else
    local entry = size .. ' ' .. id
    stored[field] = entry
    add_pair(new_blocks, field, entry)
    count = count + 1
    use(field, at)
    if ttl then
      local at_ms = now + ttl
      add_pair(new_ends, at_ms, field)
      for part_number = 1, shape_of(size).parts do call('PEXPIREAT', key_of(id, part_number), at_ms) end
    end
    tell('s', field, entry)
    answers[i] = 's'
  end
end
return {finish(), concat(answers), others}
`,
);

/** ARGV: node, then for each block: field, entry. Removes those that are still the same. → {state} */
export const removeScript = script(
  ...writing,
  values,
  `
node = ARGV[1]
local fields = {}
for at = 2, #ARGV, 2 do add(fields, ARGV[at]) end
for i, entry in ipairs(entries_of(fields)) do
  if entry == ARGV[2 * i + 1] and not gone[fields[i]] then drop(fields[i], entry) end
end
return {finish()}
`,
);

/** ARGV: field, used (µs, the server's clock), field, used ... → {state} */
export const touchScript = script(
  ...writing,
  uses,
  `
local fields = {}
for at = 1, #ARGV, 2 do add(fields, ARGV[at]) end
for i, entry in ipairs(entries_of(fields)) do
  if entry then use(fields[i], ARGV[2 * i]) end
end
return {finish()}
`,
);

/**
 * ARGV: node, the last event known, most events to return. → {state, first, last id, events}: first is the number of the oldest event
 * that is kept (0: none), last id the whole id that the last one known has here (''); events are XRANGE's, none beyond what the
 * ledger has counted. What has expired goes first.
 */
export const pollScript = script(
  core,
  needsLedger,
  changes,
  values,
  `
node = ARGV[1]
if type(pcall('HINCRBY', ledger, 'events', 0)) == 'number' then
${sweep}
end
local state = finish()
local oldest = call('XRANGE', events, '-', '+', 'COUNT', 1)[1]
local first = oldest and tonumber(match(oldest[1], '^(%d+)')) or 0
local known = call('XRANGE', events, ARGV[2], ARGV[2], 'COUNT', 1)[1]
return {state, first, known and known[1] or '', call('XRANGE', events, (ARGV[2] + 1) .. '-0', string.format('%d', number), 'COUNT', ARGV[3])}
`,
);

/**
 * A page of the directory, and the state that it is of: read one after the other, a failover between them would go unseen. ARGV:
 * cursor, about how many. → {state, server, cursor, names and entries}: server tells which process it is, because a cursor says
 * nothing to another one.
 */
export const pageScript = script(
  core,
  needsLedger,
  `
local page = call('HSCAN', blocks, ARGV[1], 'COUNT', ARGV[2])
local server = match(call('INFO', 'server'), 'run_id:(%w+)') or ''
return {{epoch, used, cap, number, now_us, at_us}, server, page[1], page[2]}
`,
);

/** → {state}: what time it is. */
export const clockScript = script(core, needsLedger, `return {{epoch, used, cap, number, now_us, at_us}}`);

/** Everything of a partition but its values goes, if it is still of that epoch ("": there is no ledger): another node may have made it anew. ARGV: epoch. */
export const resetScript = script(`
if (redis.call('HGET', KEYS[1], 'epoch') or '') ~= ARGV[1] then return 0 end
return redis.call('DEL', unpack(KEYS))
`);

/**
 * Values go that no entry names, as long as there is no ledger: once there is one, keys may be of its leases. ARGV: their keys. → 1: done;
 * 0: there is a ledger.
 */
export const orphansScript = script(`
if redis.call('EXISTS', KEYS[1]) == 1 then return 0 end
redis.call('UNLINK', unpack(ARGV))
return 1
`);

export const allScripts = [
  lookScript,
  openScript,
  reserveScript,
  commitScript,
  removeScript,
  touchScript,
  pollScript,
  pageScript,
  clockScript,
  resetScript,
  orphansScript,
] as const;
