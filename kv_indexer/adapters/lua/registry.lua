-- Shared by all scripts that write: slots and epochs. Every block of code below runs atomically.
local P = KEYS[1]
local REGISTRY, SLOTS, STREAMS = P .. 'registry', P .. 'slots', P .. 'streams'
local MAX_SLOTS = 4096 -- a bitmap is at most 512 bytes long
local call, sub, rep, char, byte = redis.call, string.sub, string.rep, string.char, string.byte

-- readers compare versions: any change of what a slot means must come through here
local function bump() call('HINCRBY', REGISTRY, 'version', 1) end

local function stream_key(name) return P .. 'stream:' .. name end

-- Hide all that the stream claims, in one step whatever its size; sweep.lua removes it later.
local function retire(key)
  local fields = call('HKEYS', key)
  for _, field in ipairs(fields) do
    local tier = string.match(field, '^slot:(.+)$')
    if tier then
      local slot = call('HGET', key, field)
      local record = cjson.decode(call('HGET', SLOTS, slot))
      record.state = 'sweeping'
      call('HSET', SLOTS, slot, cjson.encode(record))
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
  call('HSET', SLOTS, slot, cjson.encode({endpoint = who[1], rank = tonumber(who[2]), tier = tier,
    epoch = epoch, block_size = tonumber(block_size), state = 'live'}))
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
