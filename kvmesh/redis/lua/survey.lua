-- Look at some streams: renew what this indexer holds, say who has the others and what is free.
-- ARGV: indexer, lease ms, whether the streams' slots are looked at ('1'), names.
-- Returns {names and fences that it holds, names and ends of free ones, owners of the rest}, of what can be read.
local me, lease, now = ARGV[1], tonumber(ARGV[2]), now_ms()
local NAMES = 3 -- of the arguments, come before the names
local beats = pulses()

-- Void what a stream claims if `slots` does not bear it out: nobody else would notice while its pod is silent.
local function check_slots(key, name)
  local endpoint, rank = string.match(name, '^(.*)#(%d+)$')
  local flat, fields, gone = call('HGETALL', key), {}, false
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  if fields.endpoint ~= endpoint or fields.rank ~= rank or not tonumber(fields.epoch) then return end
  for field, value in pairs(fields) do
    local kind, tier = string.match(field, '^(%l+):(.+)$')
    if (kind == 'slot' or kind == 'old') and slot_number(value) then
      local record = redis.pcall('HGET', SLOTS, value)
      if type(record) == 'table' then return end -- no hash at all: the snapshot says so to everyone
      gone = gone or not is_recorded(record, endpoint, rank, tier, fields.epoch)
    end
  end
  if gone then rebuild(key) end
end

local held, free, owners = {}, {}, {}
for i = NAMES + 1, #ARGV do
  local name, key = ARGV[i], stream_key(ARGV[i])
  local record = redis.pcall('HMGET', key, 'endpoint', 'owner', 'fence', 'lease_until', 'epoch')
  if not record.err and record[1] and record[5] then -- else it is spoilt, and left alone
    local ends = lease_end(beats, record[2], record[4], me)
    if ARGV[3] == '1' then check_slots(key, name) end
    if ends <= now then
      free[#free + 1] = name
      free[#free + 1] = format('%.0f', ends)
    elseif record[2] == me and record[3] and string.find(record[3], '^%d+$') then
      call('HSET', key, 'lease_until', format('%.0f', now + lease))
      held[#held + 1] = name
      held[#held + 1] = record[3]
    elseif record[2] and record[2] ~= me then -- else nobody can write it: it is free once its time has passed
      owners[#owners + 1] = record[2]
    end
  end
end
return {held, free, owners}
