-- Apply one index change if it follows what is applied, and advance the stream in the same step.
-- ARGV: stream, epoch, previous seq, last seq, last ts, last crc, then per operation:
--   kind (S, R, C), tier, block size, group suffix, packed engine hashes, packed block keys
-- Returns {1, epoch, operations left out because no slot is free}, or {0}: does not follow, re-read the position.
local stream = stream_key(ARGV[1])
local at = call('HMGET', stream, 'epoch', 'last_seq')
if not at[1] or at[1] ~= ARGV[2] or at[2] ~= ARGV[3] then return {0} end
local epoch = tonumber(at[1])
local left_out = 0
local CHUNK = 1000 -- Lua can pass a few thousand arguments at once

-- A value is the block key, followed by the count when it is not 1.
local function count_of(value) return #value > 8 and tonumber(sub(value, 9)) or 1 end

local function set_bits(slot, names)
  if #names == 0 then return end
  local index, mask = math.floor(slot / 8) + 1, 2 ^ (7 - slot % 8)
  local fresh = rep('\0', index - 1) .. char(mask)
  local maps, pairs_, n = call('MGET', unpack(names)), {}, 0
  for i = 1, #names do
    local map, new = maps[i], nil
    if not map then
      new = fresh
    elseif #map < index then
      new = map .. rep('\0', index - 1 - #map) .. char(mask)
    else
      local old = byte(map, index)
      if bit.band(old, mask) == 0 then new = sub(map, 1, index - 1) .. char(bit.bor(old, mask)) .. sub(map, index + 1) end
    end
    if new then pairs_[n + 1] = names[i]; pairs_[n + 2] = new; n = n + 2 end
  end
  if n > 0 then call('MSET', unpack(pairs_)) end
end

local function store(slot, suffix, hashes, keys, first, last)
  local held_key, blocks = P .. 'h:' .. slot, P .. 'b:'
  local fields = {}
  for i = first, last do fields[#fields + 1] = sub(hashes, i * 8 - 7, i * 8) .. suffix end
  local held, now, hset, names = call('HMGET', held_key, unpack(fields)), {}, {}, {}
  for i, field in ipairs(fields) do
    local value = now[field] or held[i]
    if value then
      now[field] = sub(value, 1, 8) .. (count_of(value) + 1)
    else
      local block = sub(keys, (first + i) * 8 - 15, (first + i) * 8 - 8)
      now[field] = block
      names[#names + 1] = blocks .. block
    end
  end
  for field, value in pairs(now) do hset[#hset + 1] = field; hset[#hset + 1] = value end
  call('HSET', held_key, unpack(hset))
  set_bits(slot, names)
end

local function remove(slot, suffix, hashes, first, last)
  local held_key, blocks = P .. 'h:' .. slot, P .. 'b:'
  local fields = {}
  for i = first, last do fields[#fields + 1] = sub(hashes, i * 8 - 7, i * 8) .. suffix end
  local held, now, hset, hdel, names = call('HMGET', held_key, unpack(fields)), {}, {}, {}, {}
  for i, field in ipairs(fields) do
    local value = now[field]
    if value == nil then value = held[i] end
    if value then -- a hash that we do not hold is no error: its store may have been skipped
      local count = count_of(value)
      if count > 2 then
        now[field] = sub(value, 1, 8) .. (count - 1)
      elseif count == 2 then
        now[field] = sub(value, 1, 8)
      else
        now[field] = false
        names[#names + 1] = blocks .. sub(value, 1, 8)
      end
    end
  end
  for field, value in pairs(now) do
    if value then hset[#hset + 1] = field; hset[#hset + 1] = value else hdel[#hdel + 1] = field end
  end
  if #hset > 0 then call('HSET', held_key, unpack(hset)) end
  if #hdel > 0 then call('HDEL', held_key, unpack(hdel)) end
  clear_bits(slot, names)
end

for i = 7, #ARGV, 6 do
  local kind, tier, block_size, suffix, hashes, keys = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4], ARGV[i + 5]
  if kind == 'C' then
    epoch = new_epoch(stream, ARGV[3])
  else
    local slot = slot_number(call('HGET', stream, 'slot:' .. tier))
    if not slot and kind == 'S' then
      slot = take_slot(stream, tier, block_size, epoch)
      if not slot then left_out = left_out + 1 end
    end
    if slot then
      for first = 1, #hashes / 8, CHUNK do
        local last = math.min(first + CHUNK - 1, #hashes / 8)
        if kind == 'S' then store(slot, suffix, hashes, keys, first, last)
        else remove(slot, suffix, hashes, first, last) end
      end
    end
  end
end
call('HSET', stream, 'last_seq', ARGV[4], 'last_ts', ARGV[5], 'last_crc', ARGV[6])
return {1, epoch, left_out}
