-- Shared by all scripts that write: slots and epochs. Every block of code below runs atomically.
local P = KEYS[1]
local REGISTRY, SLOTS, STREAMS = P .. 'registry', P .. 'slots', P .. 'streams'
local MAX_SLOTS = 4096 -- a bitmap is at most 512 bytes long
local call, sub, rep, char, byte = redis.call, string.sub, string.rep, string.char, string.byte

-- readers compare versions: any change of what a slot means must come through here
local function bump() call('HINCRBY', REGISTRY, 'version', 1) end

local function stream_key(name) return P .. 'stream:' .. name end

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

-- Hide all that the stream claims, in one step whatever its size; sweep.lua removes it later.
local function retire(key)
  local who = call('HMGET', key, 'endpoint', 'rank', 'epoch')
  for _, field in ipairs(call('HKEYS', key)) do
    local tier = string.match(field, '^slot:(.+)$')
    if tier then
      local slot, size = slot_number(call('HGET', key, field)), call('HGET', key, 'size:' .. tier)
      if slot then put_slot(slot, who[1], who[2], tier, who[3], size, 'sweeping') end
      call('HDEL', key, field, 'size:' .. tier)
    end
  end
  bump()
end

local function next_epoch() return call('HINCRBY', REGISTRY, 'epochs', 1) end

local function new_epoch(key, last_seq)
  retire(key)
  local epoch = next_epoch()
  call('HSET', key, 'epoch', epoch, 'last_seq', last_seq, 'last_ts', '0.0', 'last_crc', '', 'degraded', '')
  return epoch
end

-- The lowest number that no source uses and no sweep is still cleaning.
local function take_slot(key, tier, block_size, epoch)
  local slot = 0
  while call('HEXISTS', SLOTS, slot) == 1 do slot = slot + 1 end
  if slot >= MAX_SLOTS then return nil end
  local who = call('HMGET', key, 'endpoint', 'rank')
  put_slot(slot, who[1], who[2], tier, epoch, block_size, 'live')
  call('HSET', key, 'slot:' .. tier, slot, 'size:' .. tier, block_size)
  bump()
  return slot
end

-- Clear bit `slot` in the bitmaps of the named blocks; a block that nobody holds is deleted.
local function clear_bits(slot, names)
  if #names == 0 then return end
  local at, mask = math.floor(slot / 8) + 1, 2 ^ (7 - slot % 8)
  local maps, pairs_, gone = call('MGET', unpack(names)), {}, {}
  local done = {}
  for i, name in ipairs(names) do
    local map = maps[i]
    local old = map and byte(map, at)
    if not done[name] and old and bit.band(old, mask) ~= 0 then
      done[name] = true
      local new = sub(map, 1, at - 1) .. char(bit.band(old, bit.bnot(mask))) .. sub(map, at + 1)
      if string.find(new, '[^%z]') then
        pairs_[#pairs_ + 1] = name; pairs_[#pairs_ + 1] = new
      else
        gone[#gone + 1] = name
      end
    end
  end
  if #pairs_ > 0 then call('MSET', unpack(pairs_)) end
  if #gone > 0 then call('DEL', unpack(gone)) end
end
