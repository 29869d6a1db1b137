-- One indexer's beat: say that it lives, what it answers for and what it could follow; forget indexers that are gone.
-- ARGV: indexer, lease ms, ms that a silent indexer's endpoints are remembered, random nonce, heartbeat seconds,
--   endpoints (JSON list), names of the streams that it could follow (JSON list), ms that its pulse lasts.
-- Returns {now in ms, names of all streams, {indexer, record, …}, names of those whose pulse has ended, deleted keys}.
local foreign = {}
for _, key in ipairs({REGISTRY, SLOTS, STREAMS, INDEXERS, PULSES}) do
  local kind = call('TYPE', key).ok
  if kind ~= 'none' and kind ~= (key == STREAMS and 'set' or 'hash') then
    call('UNLINK', key) -- the streams are rebuilt as after its loss
    foreign[#foreign + 1] = key
  end
end
local now = now_ms()
call('HSETNX', REGISTRY, 'nonce', ARGV[4])
call('SET', P .. 'heartbeat', math.floor(now / 1000), 'EX', ARGV[5])
pulse(now, ARGV[1], ARGV[8])
call('HSET', INDEXERS, ARGV[1], format('{"until_ms":%.0f,"endpoints":%s,"streams":%s}', now + ARGV[2], ARGV[6], ARGV[7]))

-- read without decoding: a record has thousands of names
local function ends_at(record)
  local written = tonumber(string.match(record, '^{"until_ms":(%d+),'))
  if written then return written end
  local readable, decoded = pcall(cjson.decode, record)
  return readable and type(decoded) == 'table' and tonumber(decoded.until_ms)
end

local answer, records = {}, call('HGETALL', INDEXERS)
for i = 1, #records, 2 do
  local ends = ends_at(records[i + 1])
  if ends and ends + ARGV[3] <= now then
    call('HDEL', INDEXERS, records[i])
    call('HDEL', PULSES, records[i])
  elseif ends and records[i] ~= ARGV[1] then
    answer[#answer + 1] = records[i]
    answer[#answer + 1] = records[i + 1]
  end
end
local still = {}
for indexer, ends in pairs(pulses()) do
  if ends <= now then still[#still + 1] = indexer end
end
return {format('%.0f', now), call('SMEMBERS', STREAMS), answer, still, foreign}
