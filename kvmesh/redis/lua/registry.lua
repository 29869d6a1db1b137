-- Shared by all scripts that write: claims, slots, epochs, and who holds a block. Each script runs atomically.
local P = KEYS[1]
local REGISTRY, SLOTS, STREAMS, INDEXERS = P .. 'registry', P .. 'slots', P .. 'streams', P .. 'indexers'
local PULSES = P .. 'pulses'
local BLOCKS = P .. 'b'
local MAX_SLOTS = 4096 -- a bitmap is at most 512 bytes long
local PLENTY, SLOTS_A_POD = 2048, 64 -- while fewer are used, any pod may take any number; then a pod with its share, none
local call, sub, rep, char, byte, format = redis.call, string.sub, string.rep, string.char, string.byte, string.format

-- readers compare versions: any change of what a slot means must come through here
local function bump() call('HINCRBY', REGISTRY, 'version', 1) end

local function stream_key(name) return P .. 'stream:' .. name end
local function held_key(slot) return P .. 'h' .. slot end

local function now_ms()
  local time = call('TIME')
  return time[1] * 1000 + math.floor(time[2] / 1000)
end

-- Whoever took the stream later has another fence; whoever was silent for too long may not write, even if nobody has.
local function is_held(fence, stored_fence, lease_until, now)
  return stored_fence == fence and (tonumber(lease_until) or 0) > now
end

-- Until which ms an indexer counts as alive; one of before this version has no pulse, and its leases speak for it.
local function pulse(now, indexer, lasts) call('HSET', PULSES, indexer, format('%.0f', now + lasts)) end

local function pulses()
  local ends, flat = {}, call('HGETALL', PULSES)
  for i = 1, #flat, 2 do ends[flat[i]] = tonumber(flat[i + 1]) end
  return ends
end

-- Until which ms a stream is its owner's: a lease ends with the pulse of who has it, except for this one itself.
local function lease_end(ends, owner, lease_until, me)
  local till = tonumber(lease_until) or 0
  local beats_till = owner ~= me and ends[owner or '']
  return beats_till and math.min(till, beats_till) or till
end

local function may_write(key, fence)
  local lease = call('HMGET', key, 'fence', 'lease_until')
  return is_held(fence, lease[1], lease[2], now_ms())
end

-- A slot's number, or nil: a stream's record may hold anything if someone else has written it.
local function slot_number(text)
  local slot = text and string.find(text, '^%d+$') and tonumber(text)
  return slot and slot < MAX_SLOTS and tostring(slot) == text and slot or nil -- '07' would be another field
end

-- Written anew each time, so that a record that someone else has spoilt stops nobody.
local function put_slot(slot, endpoint, rank, tier, epoch, size, state)
  call('HSET', SLOTS, slot, cjson.encode({endpoint = endpoint or '', rank = tonumber(rank) or 0, tier = tier,
    epoch = tonumber(epoch) or 0, block_size = tonumber(size) or 0, state = state}))
end

-- The state of a slot that is in use. Readers that know nothing of KV cache groups (a tier with a slash) do not know
-- the second: they would take such a slot's blocks for a part of the prefix.
local function used_state(tier) return string.find(tier, '/', 1, true) and 'group' or 'live' end

-- Tiers whose removals are always reported: the GPU's, of any group.
local function is_gpu(tier) return tier == 'GPU' or sub(tier, 1, 4) == 'GPU/' end

-- A slot's record, or nil if it is not ours to read.
local function slot_record(text)
  local readable, record = pcall(cjson.decode, text or '')
  return readable and type(record) == 'table' and record or nil
end

-- Whether `slots` says of a slot what its stream says: without that the number may be given to another.
local function is_recorded(text, endpoint, rank, tier, epoch)
  local record = slot_record(text)
  return record and record.state == used_state(tier) and record.tier == tier and record.endpoint == endpoint
    and record.rank == tonumber(rank) and record.epoch == tonumber(epoch)
end

-- Hide one slot of a stream, in one step whatever it holds; sweep.lua removes its blocks later. What has become
-- another's is left alone.
local function retire_slot(key, slot, tier)
  local who = call('HMGET', key, 'endpoint', 'rank', 'epoch', 'size:' .. tier)
  local now = slot_record(call('HGET', SLOTS, slot))
  if now and now.state ~= 'sweeping' and (now.endpoint ~= who[1] or now.rank ~= tonumber(who[2])) then return end
  put_slot(slot, who[1], who[2], tier, who[3], who[4], 'sweeping')
  bump()
end

-- Hide all that the stream claims.
local function retire(key)
  local record, gone = call('HGETALL', key), {}
  for i = 1, #record, 2 do
    local kind, tier = string.match(record[i], '^(%l+):(.+)$')
    if kind == 'slot' or kind == 'old' then
      local slot = slot_number(record[i + 1])
      if slot then retire_slot(key, slot, tier) end
    end
    if kind and kind ~= 'refused' then gone[#gone + 1] = record[i] end
  end
  if #gone > 0 then call('HDEL', key, unpack(gone)) end
  bump()
end

local function new_epoch(key, last_seq)
  retire(key)
  local epoch = call('HINCRBY', REGISTRY, 'epochs', 1)
  call('HSET', key, 'epoch', epoch, 'last_seq', last_seq, 'part', 0, 'last_ts', '0.0', 'last_crc', '', 'degraded', '')
  return epoch
end

-- Void all that a stream has claimed because what the registry had of it is gone: its follower replays.
local function rebuild(key)
  new_epoch(key, -1)
  call('HSET', key, 'state', 'replaying', 'reason', 'registry-damaged')
  call('HDEL', key, 'groups')
  bump()
end

-- Blocks without a record: `slots` was lost, or part of it. They must be gone before the number is given out.
local function is_leftover(slot)
  if call('EXISTS', held_key(slot)) == 0 then return false end
  put_slot(slot, '', 0, '', 0, 0, 'sweeping')
  return true
end

-- The lowest number that no source uses and no sweep is still cleaning; or nil and the reason. A pod's share counts its
-- slots that wait for their sweep.
local function take_slot(key, tier, block_size, epoch, now)
  local who, taken = call('HMGET', key, 'endpoint', 'rank'), call('HLEN', SLOTS)
  if taken >= MAX_SLOTS then return nil, 'no-free-slot' end
  if taken >= PLENTY then
    local mine, own = '"endpoint":' .. cjson.encode(who[1]), 0
    for _, record in ipairs(call('HVALS', SLOTS)) do
      if string.find(record, mine, 1, true) then own = own + 1 end
    end
    if own >= SLOTS_A_POD then return nil, 'slot-share' end
  end
  local used, slot = {}, 0
  for _, number in ipairs(call('HKEYS', SLOTS)) do used[number] = true end
  while slot < MAX_SLOTS and (used[tostring(slot)] or is_leftover(slot)) do slot = slot + 1 end
  if slot >= MAX_SLOTS then return nil, 'no-free-slot' end
  put_slot(slot, who[1], who[2], tier, epoch, block_size, used_state(tier))
  call('HSET', key, 'slot:' .. tier, slot, 'size:' .. tier, block_size, 'since:' .. tier, format('%.3f', now / 1000))
  bump()
  return slot
end

-- Begin another generation of a tier: the last becomes the old one, the old one is hidden.
local function rotate(key, tier, slot, old)
  if old then retire_slot(key, old, tier) end
  call('HDEL', key, 'slot:' .. tier)
  call('HSET', key, 'old:' .. tier, slot)
end

-- Who holds a block: one slot in decimal, which costs Redis no memory, or 'B' and a bitmap, bit 0 first.
local ONE_BIT = {}
for bit_ = 0, 7 do ONE_BIT[2 ^ (7 - bit_)] = bit_ end

local function bitmap_of(value)
  if byte(value) == 66 then return sub(value, 2) end
  local slot = slot_number(value)
  return slot and rep('\0', math.floor(slot / 8)) .. char(2 ^ (7 - slot % 8)) or '' -- '' if it is not ours to read
end

local function add_holder(slot, names)
  local me, at, mask = tostring(slot), math.floor(slot / 8) + 1, 2 ^ (7 - slot % 8)
  local values, pairs_, n = call('MGET', unpack(names)), {}, 0
  for i = 1, #names do
    local value, new = values[i], me
    if value and value ~= me then
      local map = bitmap_of(value)
      local old = byte(map, at) or 0
      if map ~= '' then
        new = 'B' .. sub(map, 1, at - 1) .. rep('\0', at - 1 - #map) .. char(bit.bor(old, mask)) .. sub(map, at + 1)
      end
    end
    if new ~= value then pairs_[n + 1] = names[i]; pairs_[n + 2] = new; n = n + 2 end
  end
  if n > 0 then call('MSET', unpack(pairs_)) end
end

-- A block that nobody holds any more is deleted.
local function remove_holder(slot, names)
  if #names == 0 then return end
  local me, at, mask = tostring(slot), math.floor(slot / 8) + 1, 2 ^ (7 - slot % 8)
  local values, pairs_, gone, n = call('MGET', unpack(names)), {}, {}, 0
  for i = 1, #names do
    local value = values[i]
    if value == me then
      gone[#gone + 1] = names[i]
    elseif value and byte(value) == 66 then
      local old = byte(value, at + 1)
      if old and bit.band(old, mask) ~= 0 then
        local map = sub(value, 2, at) .. char(bit.band(old, bit.bnot(mask))) .. sub(value, at + 2)
        map = string.match(map, '^(.*[^%z])%z*$') or ''
        local first, _, only = string.find(map, '^%z*([^%z])$')
        local left = first and ONE_BIT[byte(only)]
        if map == '' then
          gone[#gone + 1] = names[i]
        else
          pairs_[n + 1] = names[i]
          pairs_[n + 2] = left and tostring((#map - 1) * 8 + left) or 'B' .. map
          n = n + 2
        end
      end
    end
  end
  if n > 0 then call('MSET', unpack(pairs_)) end
  if #gone > 0 then call('DEL', unpack(gone)) end
end
