-- One indexer's beat: say that it lives, renew its leases, take and give back streams, drop what nobody lists.
-- ARGV: indexer, lease ms, ms that a silent indexer's endpoints are remembered, random nonce, heartbeat seconds,
--   endpoints (JSON list), candidates (JSON list of [stream, endpoint, rank]).
-- Returns {stream, fence, …} of all that it holds now.
local me, lease, forget, candidates = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3]), cjson.decode(ARGV[7])
local UNOWNED_MS = 1000 -- whoever could follow a stream that nobody took for so long takes it, share or not
local now = now_ms()

local own, mine, list = {}, {}, {}
for _, candidate in ipairs(candidates) do
  own[#own + 1] = candidate[1]
  mine[candidate[1]] = candidate
  list[#list + 1] = cjson.encode(candidate[1])
end
table.sort(own)
call('HSETNX', REGISTRY, 'nonce', ARGV[4])
call('SET', P .. 'heartbeat', math.floor(now / 1000), 'EX', ARGV[5])
call('HSET', INDEXERS, me, format('{"until_ms":%.0f,"endpoints":%s,"streams":[%s]}', now + lease, ARGV[6],
  table.concat(list, ',')))

-- Who lives, which endpoints anyone lists, and how many could follow each stream.
local live, listed, followers = {}, {}, {}
local records = call('HGETALL', INDEXERS)
for i = 1, #records, 2 do
  local readable, record = pcall(cjson.decode, records[i + 1])
  local ends = readable and type(record) == 'table' and tonumber(record.until_ms)
  if ends and ends + forget <= now then
    call('HDEL', INDEXERS, records[i])
  elseif ends and type(record.endpoints) == 'table' and type(record.streams) == 'table' then
    for _, endpoint in ipairs(record.endpoints) do listed[endpoint] = true end
    if ends > now then
      local could = {}
      for _, name in ipairs(record.streams) do
        could[name] = true
        followers[name] = (followers[name] or 0) + 1
      end
      live[records[i]] = {could = could, held = 0, share = 0}
    end
  end
end
for _, indexer in pairs(live) do
  for name in pairs(indexer.could) do indexer.share = indexer.share + 1 / followers[name] end
  indexer.share = math.ceil(indexer.share - 1e-9)
end

local function give_back(name)
  call('HSET', stream_key(name), 'owner', '', 'lease_until', format('%.0f', now))
end

local function register(name, endpoint, rank)
  local key = stream_key(name)
  call('HSET', key, 'endpoint', endpoint, 'rank', rank, 'state', 'replaying', 'reason', '', 'owner', '', 'fence', 0,
    'lease_until', format('%.0f', now), 'applied_at', 0, 'events', 0)
  new_epoch(key, -1)
  call('SADD', STREAMS, name)
end

-- Void what a stream claims if `slots` does not bear it out: nobody else would notice while its pod is silent.
local function check_slots(key, endpoint, rank)
  local flat, fields, gone = call('HGETALL', key), {}, false
  for i = 1, #flat, 2 do fields[flat[i]] = flat[i + 1] end
  if fields.endpoint ~= endpoint or fields.rank ~= tostring(rank) or not tonumber(fields.epoch) then return end
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

-- Greater than all before, also after Redis was emptied or has failed over to a replica that lags.
local function next_fence()
  local fence = format('%.0f', math.max((tonumber(call('HGET', REGISTRY, 'fences')) or 0) + 1, now))
  call('HSET', REGISTRY, 'fences', fence)
  return fence
end

-- Whose slots are looked at this time: all, or in a large fleet a part that begins anywhere, because it holds up others.
local LOOKS = 256
local looked_at, first = {}, tonumber(string.sub(ARGV[4], 1, 6), 16) or 0
for i = 1, math.min(#own, LOOKS) do looked_at[own[(first + i) % #own + 1]] = true end

-- Each stream as the registry has it; a record that cannot be read is left alone, and so is its stream.
local kept, free, spoilt, seen = {}, {}, {}, {}
for _, name in ipairs(call('SMEMBERS', STREAMS)) do seen[name] = true end
for _, name in ipairs(own) do -- ours, but `streams` was lost, or part of it
  local record = not seen[name] and redis.pcall('HMGET', stream_key(name), 'endpoint', 'rank', 'epoch', 'fence')
  if record and not record.err and record[1] == mine[name][2] and record[2] == tostring(mine[name][3])
    and tonumber(record[3]) and tonumber(record[4]) then
    rebuild(stream_key(name))
    call('SADD', STREAMS, name)
    seen[name] = true
  end
end
local known = {}
for name in pairs(seen) do known[#known + 1] = name end
table.sort(known)
for _, name in ipairs(known) do
  local key = stream_key(name)
  local record = redis.pcall('HMGET', key, 'endpoint', 'owner', 'fence', 'lease_until', 'epoch', 'state')
  local ends = tonumber(record[4]) or 0
  if record.err or not record[1] or not record[5] then
    spoilt[name] = true
  elseif not listed[record[1]] then
    retire(key)
    call('DEL', key)
    call('SREM', STREAMS, name)
  else
    if looked_at[name] then check_slots(key, mine[name][2], mine[name][3]) end
    if ends > now and live[record[2]] then live[record[2]].held = live[record[2]].held + 1 end
    if ends > now and record[2] == me then
      if mine[name] then kept[#kept + 1] = {name, record[3]} else give_back(name) end
    elseif ends <= now then
      if mine[name] then free[name] = ends end
      if not followers[name] and ends + UNOWNED_MS < now and record[6] ~= 'lost' then
        call('HSET', key, 'state', 'lost', 'reason', 'not-followed') -- nobody keeps it true
        bump()
      end
    end
  end
end
for _, name in ipairs(own) do
  if not seen[name] and call('EXISTS', stream_key(name)) == 1 then spoilt[name] = true end
  if not seen[name] and not spoilt[name] then
    register(name, mine[name][2], mine[name][3])
    free[name] = now
  end
end

-- Give back what is too much, if another would take it.
local share = live[me].share
for i = #kept, 1, -1 do
  if #kept <= share then break end
  for id, indexer in pairs(live) do
    if id ~= me and indexer.could[kept[i][1]] and indexer.held < indexer.share then
      indexer.held = indexer.held + 1
      give_back(kept[i][1])
      table.remove(kept, i)
      break
    end
  end
end

for _, held in ipairs(kept) do call('HSET', stream_key(held[1]), 'lease_until', format('%.0f', now + lease)) end
for _, name in ipairs(own) do
  if free[name] and (#kept < share or free[name] + UNOWNED_MS < now) then
    local fence = next_fence()
    call('HSET', stream_key(name), 'owner', me, 'fence', fence, 'lease_until', format('%.0f', now + lease))
    kept[#kept + 1] = {name, fence}
  end
end
local answer = {}
for _, held in ipairs(kept) do
  answer[#answer + 1] = held[1]
  answer[#answer + 1] = held[2]
end
return answer
