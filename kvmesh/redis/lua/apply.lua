-- Apply index changes of several streams, each if it follows what is applied, and advance its stream in the same step.
-- ARGV: blocks a source may hold, seconds a generation lasts, then per change the number of its arguments and these:
--   stream, fence, epoch, previous seq, last seq, last ts, last crc, events, groups (JSON or ''), why the epoch is not
--   exact after it or '', the part of the next batch that is applied and the one that this is (0: none, the change
--   completes its batches), then per operation: kind (S store, F store of what may be held already, R remove, C clear),
--   tier, block size, group suffix, packed engine hashes, packed block keys
-- Returns per change {1, epoch, {reason, operations left out, …}}, {0}: does not follow, re-read the position, {-1}: not
-- yours, or an error. A stream whose slots are not on record any more does not follow: it has begun a new epoch by then.
local REFUSED_MS = 1000 -- before a slot is asked for again
local CHUNK, HEAD = 1000, 12 -- Lua can pass a few thousand arguments at once
local cap, generation_ms, now = tonumber(ARGV[1]), ARGV[2] * 1000, now_ms()
local stream, epoch -- of the change at hand

-- A value is the block key, followed by the count when it is not 1.
local function count_of(value) return #value > 8 and tonumber(sub(value, 9)) or 1 end

-- Some are held already, or twice in this operation, or too many. Returns whether any was left out.
local function store_counting(source, set_only, held, fields, pairs_)
  local now_, hset, fresh, left_out = {}, {}, {}, false
  for j = 1, #fields do
    local field = fields[j]
    local value = now_[field] or held[j]
    if value then
      if not set_only then now_[field] = sub(value, 1, 8) .. (count_of(value) + 1) end
    elseif source.blocks >= cap then
      left_out = true
    else
      source.blocks = source.blocks + 1
      now_[field] = pairs_[2 * j]
      fresh[#fresh + 1] = BLOCKS .. pairs_[2 * j]
    end
  end
  for field, value in pairs(now_) do hset[#hset + 1] = field; hset[#hset + 1] = value end
  if #hset > 0 then call('HSET', held_key(source.slot), unpack(hset)) end
  if #fresh > 0 then add_holder(source.slot, fresh) end
  return left_out
end

local function store(source, set_only, suffix, hashes, keys, first, last)
  local held_in, me, n = held_key(source.slot), tostring(source.slot), last - first + 1
  local fields, pairs_, holders, j = {}, {}, {}, 0
  for i = first * 8 - 7, last * 8, 8 do
    local field, key = sub(hashes, i, i + 7) .. suffix, sub(keys, i, i + 7)
    fields[j / 2 + 1] = field
    pairs_[j + 1] = field; pairs_[j + 2] = key
    holders[j + 1] = BLOCKS .. key; holders[j + 2] = me
    j = j + 2
  end
  local held = call('HMGET', held_in, unpack(fields))
  local fresh = source.blocks + n <= cap
  for i = 1, n do
    if held[i] then fresh = false; break end
  end
  if fresh then -- the common case: three commands, whatever the number of blocks
    if call('HSET', held_in, unpack(pairs_)) == n then
      source.blocks = source.blocks + n
      if call('MSETNX', unpack(holders)) == 0 then
        local blocks = {}
        for i = 1, n do blocks[i] = holders[2 * i - 1] end
        add_holder(source.slot, blocks)
      end
      return false
    end
    call('HDEL', held_in, unpack(fields)) -- a hash came twice: count one by one
  end
  return store_counting(source, set_only, held, fields, pairs_)
end

local function remove(source, suffix, hashes, first, last)
  local held_in, fields, blocks, single, n = held_key(source.slot), {}, {}, true, 0
  for i = first * 8 - 7, last * 8, 8 do
    n = n + 1
    fields[n] = sub(hashes, i, i + 7) .. suffix
  end
  local held = call('HMGET', held_in, unpack(fields))
  for i = 1, n do
    local value = held[i]
    if not value or #value ~= 8 then single = false; break end
    blocks[i] = BLOCKS .. value
  end
  if single then -- the common case: all are held once
    source.blocks = source.blocks - call('HDEL', held_in, unpack(fields))
    remove_holder(source.slot, blocks)
    return
  end
  local now_, hset, hdel = {}, {}, {}
  blocks = {}
  for i, field in ipairs(fields) do
    local value = now_[field]
    if value == nil then value = held[i] end
    if value then -- a hash that we do not hold is no error: its store may have been left out
      local count = count_of(value)
      if count > 2 then
        now_[field] = sub(value, 1, 8) .. (count - 1)
      elseif count == 2 then
        now_[field] = sub(value, 1, 8)
      else
        now_[field] = false
        blocks[#blocks + 1] = BLOCKS .. sub(value, 1, 8)
      end
    end
  end
  for field, value in pairs(now_) do
    if value then hset[#hset + 1] = field; hset[#hset + 1] = value else hdel[#hdel + 1] = field end
  end
  if #hset > 0 then call('HSET', held_in, unpack(hset)) end
  if #hdel > 0 then source.blocks = source.blocks - call('HDEL', held_in, unpack(hdel)) end
  remove_holder(source.slot, blocks)
end

-- Who removes tells the truth from here on: what an earlier generation holds was never removed, so it is not believed.
local function mark_removing(source, tier)
  source.removes = '1'
  call('HSET', stream, 'removes:' .. tier, 1)
  if source.old then
    retire_slot(stream, source.old, tier)
    call('HDEL', stream, 'old:' .. tier)
    source.old = nil
  end
end

-- Returns why nothing can be stored, or nil. A refusal holds for a second, because asking again is what costs.
local function ready_to_store(source, tier, block_size)
  if source.slot and not source.removes and not is_gpu(tier) and now - source.since * 1000 >= generation_ms then
    rotate(stream, tier, source.slot, source.old)
    source.old, source.slot = source.slot, nil
  end
  if source.slot then return end
  local ends, reason = string.match(call('HGET', stream, 'refused:' .. tier) or '', '^(%d+) (.+)$')
  if ends and tonumber(ends) > now then return reason end
  source.slot, reason = take_slot(stream, tier, block_size, epoch, now)
  source.since, source.blocks = now / 1000, 0
  if reason then call('HSET', stream, 'refused:' .. tier, format('%.0f %s', now + REFUSED_MS, reason)) end
  return reason
end

-- The arguments of one change are `before` + 1 to `ending`.
local function apply(before, ending)
  local name, fence, expected, previous_seq, last_seq, last_ts, last_crc, events, groups, degraded, part_before, part =
    unpack(ARGV, before + 1, before + HEAD)
  local operations = before + HEAD + 1
  stream = stream_key(name)
  local names = {'fence', 'lease_until', 'epoch', 'last_seq', 'events', 'degraded', 'state', 'endpoint', 'rank', 'part'}
  local tiers = {}
  for i = operations, ending, 6 do
    local tier = ARGV[i + 1]
    if tier ~= '' and not tiers[tier] then
      local n = #names
      tiers[tier] = n
      names[n + 1], names[n + 2], names[n + 3], names[n + 4] =
        'slot:' .. tier, 'old:' .. tier, 'since:' .. tier, 'removes:' .. tier
    end
  end
  local at = call('HMGET', stream, unpack(names))
  if not is_held(fence, at[1], at[2], now) then return {-1} end
  if at[3] ~= expected or at[4] ~= previous_seq or (at[10] or '0') ~= part_before then return {0} end
  epoch = tonumber(at[3])
  local doubt, left_out = '', {}

  -- What each tier has, read before anything is written: a key of another type must not stop us half way.
  local sources = {}
  for tier, n in pairs(tiers) do
    local slot, old = slot_number(at[n + 1]), slot_number(at[n + 2])
    for _, number in pairs({slot, old}) do
      if not is_recorded(call('HGET', SLOTS, number), at[8], at[9], tier, at[3]) then
        rebuild(stream)
        return {0}
      end
    end
    sources[tier] = {slot = slot, old = old, since = tonumber(at[n + 3]) or 0, removes = at[n + 4],
      blocks = slot and call('HLEN', held_key(slot)) or 0}
  end

  for i = operations, ending, 6 do
    local kind, tier, suffix, hashes, keys = ARGV[i], ARGV[i + 1], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
    local count = #hashes / 8
    if kind == 'C' then
      epoch = new_epoch(stream, previous_seq)
      for name in pairs(sources) do sources[name] = {blocks = 0} end
      at[6], doubt = '', '' -- what was left out before is void anyway
    elseif kind == 'R' then
      local source = sources[tier]
      if not source.removes then mark_removing(source, tier) end
      if source.slot then
        for first = 1, count, CHUNK do remove(source, suffix, hashes, first, math.min(first + CHUNK - 1, count)) end
      end
    else
      local reason, is_full = ready_to_store(sources[tier], tier, ARGV[i + 2]), false
      for first = 1, reason and 0 or count, CHUNK do
        local last = math.min(first + CHUNK - 1, count)
        is_full = store(sources[tier], kind == 'F', suffix, hashes, keys, first, last) or is_full
      end
      if reason or is_full then
        reason = reason or 'source-full'
        left_out[reason] = (left_out[reason] or 0) + 1
        if doubt == '' then doubt = reason end
      end
    end
  end
  local more = {}
  if groups ~= '' then more = {'groups', groups} end
  if part_before ~= part then more[#more + 1] = 'part'; more[#more + 1] = part end
  if degraded ~= '' then doubt = degraded end
  if doubt ~= '' and (at[6] or '') == '' then
    more[#more + 1] = 'degraded'; more[#more + 1] = doubt
    if at[7] == 'live' then
      call('HSET', stream, 'state', 'degraded', 'reason', doubt)
      bump()
    end
  end
  call('HSET', stream, 'last_seq', last_seq, 'last_ts', last_ts, 'last_crc', last_crc,
    'applied_at', format('%.3f', now / 1000), 'events', (tonumber(at[5]) or 0) + events, unpack(more))
  local reasons = {}
  for reason, count in pairs(left_out) do reasons[#reasons + 1] = reason; reasons[#reasons + 1] = count end
  return {1, epoch, reasons}
end

local replies, before = {}, 3
while before < #ARGV do
  local ending = before + ARGV[before]
  local done, reply = pcall(apply, before, ending) -- an error must not keep the other streams' changes back
  replies[#replies + 1] = (done or type(reply) == 'table') and reply or {err = 'ERR Error running script: ' .. reply}
  before = ending + 1
end
return replies
