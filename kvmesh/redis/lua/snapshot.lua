-- Read the whole registry at one instant: nonce, version, heartbeat (1 or 0), slots (number, record, blocks), streams
-- (name and 12 fields each, the last tells whether who has its lease lives). A single stream or slot of another type is told as
-- such (no fields, -1 blocks); what all readers need is an error that names the key.
-- ARGV: how many slots and streams are read in one go, because Redis serves nobody else meanwhile (none: all). Of more,
-- only slots with their records and the streams' names are given, and a sixth value.
local P = KEYS[1]
local broken
local function failed(answer) return type(answer) == 'table' and answer.err end
local function need(command, key, ...)
  local answer = redis.pcall(command, key, ...)
  if failed(answer) then
    broken = redis.error_reply(answer.err .. ' (' .. key .. ')')
    return {}
  end
  return answer
end

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local head = need('HMGET', P .. 'registry', 'nonce', 'version')
local slots, streams = {}, {}
local records, names = need('HGETALL', P .. 'slots'), need('SMEMBERS', P .. 'streams')
if ARGV[1] and #records / 2 + #names > tonumber(ARGV[1]) then
  return broken or {head[1], head[2], redis.call('EXISTS', P .. 'heartbeat'), records, names, 'unread'}
end
for i = 1, #records, 2 do
  local blocks = redis.pcall('HLEN', P .. 'h' .. records[i])
  slots[#slots + 1] = records[i]
  slots[#slots + 1] = records[i + 1]
  slots[#slots + 1] = failed(blocks) and -1 or blocks
end
local pulses, flat = {}, need('HGETALL', P .. 'pulses')
for i = 1, #flat, 2 do pulses[flat[i]] = tonumber(flat[i + 1]) end
for _, name in ipairs(names) do
  local fields = redis.pcall('HMGET', P .. 'stream:' .. name, 'endpoint', 'rank', 'epoch', 'last_seq', 'last_ts', 'state',
    'reason', 'owner', 'fence', 'applied_at', 'events', 'lease_until')
  if failed(fields) then fields = {} end
  streams[#streams + 1] = name
  for i = 1, 11 do streams[#streams + 1] = fields[i] or false end
  -- without a pulse (an indexer of before this version) the lease alone counts
  local lives = (pulses[fields[8] or ''] or now + 1) > now
  streams[#streams + 1] = lives and (tonumber(fields[12]) or 0) > now and 1 or 0
end
return broken or {head[1], head[2], redis.call('EXISTS', P .. 'heartbeat'), slots, streams}
