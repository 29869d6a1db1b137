-- Read the whole registry at one instant: nonce, version, slots (number, record, blocks), streams (7 fields each).
local P = KEYS[1]
local call = redis.call
local head = call('HMGET', P .. 'registry', 'nonce', 'version')
local slots, streams = {}, {}
local records = call('HGETALL', P .. 'slots')
for i = 1, #records, 2 do
  slots[#slots + 1] = records[i]
  slots[#slots + 1] = records[i + 1]
  slots[#slots + 1] = call('HLEN', P .. 'h:' .. records[i])
end
for _, name in ipairs(call('SMEMBERS', P .. 'streams')) do
  local fields = call('HMGET', P .. 'stream:' .. name, 'endpoint', 'rank', 'epoch', 'last_seq', 'last_ts', 'state', 'reason')
  if fields[1] then
    for i = 1, 7 do streams[#streams + 1] = fields[i] end
  end
end
return {head[1], head[2], slots, streams}
