-- Clean one slice of the slots that are no longer believed, and free each once it is empty; let tiers that never
-- report removals grow old. ARGV: cursor of the slice before ('0' to begin), fields a slice, seconds a generation lasts, who sweeps.
-- Returns {last slot, cursor for the next slice, fields removed}, or {} when nothing waits or another sweeps. Records that cannot be read, and
-- slots whose blocks are of another type, are left alone: they are not ours to clean.
local now = now_ms()
local TURN_MS = 2000 -- a sweeper that says nothing for so long is taken for dead
local LOOKED_AT = 64 -- numbers a call
local FREED_AT_ONCE = 64 -- slots with next to nothing in them: under a millisecond
local AGED_AT_ONCE = 100 -- streams: about 2 ms

-- one at a time, whatever the number of indexers: each pauses by its own clock
local turn = call('HMGET', REGISTRY, 'sweeper', 'sweeper_until')
if turn[1] and turn[1] ~= ARGV[4] and (tonumber(turn[2]) or 0) > now then return {} end

-- apply.lua begins generations when it stores; this is for tiers in which nothing is stored any more
local function age(key)
  local record, fields = redis.pcall('HGETALL', key), {}
  for i = 1, #record, 2 do fields[record[i]] = record[i + 1] end
  for field, value in pairs(fields) do
    local tier = string.match(field, '^since:(.+)$')
    local void = tier and not is_gpu(tier) and not fields['removes:' .. tier]
      and now - (tonumber(value) or 0) * 1000 >= ARGV[3] * 1000
    if void then
      local slot, old = slot_number(fields['slot:' .. tier]), slot_number(fields['old:' .. tier])
      if slot then
        rotate(key, tier, slot, old)
        call('HSET', key, field, format('%.3f', now / 1000))
      elseif old then
        retire_slot(key, old, tier)
        call('HDEL', key, 'old:' .. tier, field)
      end
    end
  end
end

-- some streams a call, because Redis serves nobody else meanwhile: `aged` is where the next one goes on
local aged = call('HMGET', REGISTRY, 'aged_at', 'aged')
if now - (tonumber(aged[1]) or 0) * 1000 >= math.min(ARGV[3] / 4, 60) * 1000 or (tonumber(aged[2]) or 0) ~= 0 then
  local page = call('SSCAN', STREAMS, tonumber(aged[2]) and aged[2] or '0', 'COUNT', AGED_AT_ONCE)
  call('HSET', REGISTRY, 'aged_at', format('%.3f', now / 1000), 'aged', page[1])
  for _, name in ipairs(page[2]) do age(stream_key(name)) end
end

local slots, marked, waiting = call('HGETALL', SLOTS), {}, {}
for i = 1, #slots, 2 do
  local slot = slot_number(slots[i])
  if slot and string.find(slots[i + 1], 'sweeping', 1, true) then marked[#marked + 1] = {slot, slots[i + 1]} end
end
table.sort(marked, function(one, other) return one[1] < other[1] end)
for _, each in ipairs(marked) do
  local record = slot_record(each[2])
  if record and record.state == 'sweeping' then
    local kind = call('TYPE', held_key(each[1])).ok
    if kind == 'hash' or kind == 'none' then waiting[#waiting + 1] = each[1] end
    if #waiting == FREED_AT_ONCE then break end
  end
end
if #waiting == 0 then
  if turn[1] == ARGV[4] then call('HDEL', REGISTRY, 'sweeper', 'sweeper_until') end
  -- what a lost `slots` has left behind is found in turn
  local used, first = {}, (tonumber(call('HGET', REGISTRY, 'looked_at')) or 0) % MAX_SLOTS
  for i = 1, #slots, 2 do used[slots[i]] = true end
  for slot = first, math.min(first + LOOKED_AT, MAX_SLOTS) - 1 do
    if not used[tostring(slot)] then is_leftover(slot) end
  end
  call('HSET', REGISTRY, 'looked_at', (first + LOOKED_AT) % MAX_SLOTS)
  return {}
end
call('HSET', REGISTRY, 'sweeper', ARGV[4], 'sweeper_until', format('%.0f', now + TURN_MS))
local cursor, left, removed, slot = ARGV[1], tonumber(ARGV[2]), 0
for i = 1, #waiting do
  slot = waiting[i]
  local held_in = held_key(slot)
  local page = call('HSCAN', held_in, cursor, 'COUNT', left)
  local fields, names = {}, {}
  for j = 1, #page[2], 2 do
    fields[#fields + 1] = page[2][j]
    names[#names + 1] = BLOCKS .. sub(page[2][j + 1], 1, 8)
  end
  for first = 1, #fields, 1000 do
    local last = math.min(first + 999, #fields)
    remove_holder(slot, {unpack(names, first, last)})
    removed = removed + call('HDEL', held_in, unpack(fields, first, last))
  end
  cursor, left = page[1], left - #fields
  if call('EXISTS', held_in) == 1 then break end
  call('HDEL', SLOTS, slot)
  cursor = '0'
  if left <= 0 then break end
end
if removed > 0 then call('HINCRBY', REGISTRY, 'swept', removed) end
return {slot, cursor, removed}
