-- What one tenant may use of one model: three token buckets and the requests that are open. Atomic, by Redis' clock.
-- KEYS: levels ("now_ms requests prompt generated"), open requests (sorted set: member -> Redis ms when its lease ends).
-- ARGV: lease ms, most open requests (-1: no limit), then rate a second (-1: no limit) and capacity of each bucket, then
--   'take', three amounts, member: all or nothing;
--   'settle', three amounts (negative: given back), number of members that ended, these, members that are still open.
-- Returns {limit that refuses (1 to 4; 0: none), ms to wait, thousandths of the three levels}; {-1, error} where nothing
-- can be written: as an error it would look to the caller as if this were the wrong server for lookups, too.
local LEVELS, OPEN = KEYS[1], KEYS[2]
local HOUR = 3600 -- the longest debt in seconds
local lease, most_open, op = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[9]
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local fault

local function write(...)
  if fault then return end
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    fault = answer.err
    return
  end
  return answer
end

-- Somebody else's value under our name is dropped.
local function on_open(...)
  local answer = redis.pcall(...)
  if type(answer) == 'table' and answer.err then
    if not string.find(answer.err, 'WRONGTYPE', 1, true) then
      fault = fault or answer.err
      return
    end
    write('DEL', OPEN)
    answer = write(...)
  end
  return answer
end

local stored, fields = redis.pcall('GET', LEVELS), {}
if type(stored) == 'string' then fields = {string.match(stored, '^(%S+) (%S+) (%S+) (%S+)$')} end
local at = tonumber(fields[1]) or now
local ahead = not (at <= now) -- written by a server whose clock was ahead
local seconds = ahead and 0 or (now - at) / 1000

local rate, capacity, level, amount = {}, {}, {}, {}
for i = 1, 3 do
  rate[i], level[i] = tonumber(ARGV[1 + 2 * i]), 0
  if rate[i] >= 0 then
    capacity[i], amount[i] = tonumber(ARGV[2 + 2 * i]), tonumber(ARGV[9 + i])
    local there = (tonumber(fields[i + 1]) or capacity[i]) + seconds * rate[i]
    if not (there <= capacity[i]) then there = capacity[i] end -- also what is no number
    level[i] = math.max(there, -HOUR * rate[i])
  end
end

local function bounded(i) level[i] = math.max(math.min(level[i] - amount[i], capacity[i]), -HOUR * rate[i]) end

local function store()
  local rest = 0
  for i = 1, 3 do
    if rate[i] > 0 then rest = math.max(rest, (capacity[i] - level[i]) / rate[i]) end
  end
  if rest <= 0 then -- a full one is as good as none
    if stored then write('DEL', LEVELS) end
    return
  end
  local words = {string.format('%.0f', now)}
  for i = 1, 3 do words[i + 1] = rate[i] < 0 and 'full' or string.format('%.3f', level[i]) end -- for a later limit
  write('SET', LEVELS, table.concat(words, ' '), 'PX', string.format('%.0f', math.ceil(rest * 1000) + 1000))
end

local refused, wait = 0, 0
if op == 'take' then
  for i = 1, 3 do
    if rate[i] >= 0 then
      -- more than the capacity can be had when the bucket is full
      local missing = (capacity[i] > 0 and math.min(amount[i], capacity[i]) or amount[i]) - level[i]
      if missing > 0.001 then
        local ms = rate[i] > 0 and math.ceil(missing / rate[i] * 1000) or 60000
        if ms > wait then refused, wait = i, ms end
      end
    end
  end
  if most_open >= 0 and refused == 0 then
    on_open('ZREMRANGEBYSCORE', OPEN, '-inf', now)
    -- no picker's lease is longer: a foreign member, or one by a clock that was ahead, which its picker renews
    on_open('ZREMRANGEBYSCORE', OPEN, string.format('(%.0f', now + lease), '+inf')
    if not fault and (redis.call('ZCARD', OPEN)) >= most_open then
      refused = 4
      write('PEXPIRE', OPEN, lease + 1000) -- what others have written may have no end
    end
  end
  if refused == 0 and not fault then
    for i = 1, 3 do
      if rate[i] >= 0 then bounded(i) end
    end
    store()
    if most_open >= 0 then
      on_open('ZADD', OPEN, now + lease, ARGV[13])
      write('PEXPIRE', OPEN, lease + 1000)
    end
  elseif ahead then
    store()
  end
else
  for i = 1, 3 do
    if rate[i] >= 0 then bounded(i) end
  end
  store()
  local ended = tonumber(ARGV[13])
  if ended > 0 then on_open('ZREM', OPEN, unpack(ARGV, 14, 13 + ended)) end
  if #ARGV > 13 + ended then
    local renewed = {}
    for i = 14 + ended, #ARGV do
      renewed[#renewed + 1] = now + lease
      renewed[#renewed + 1] = ARGV[i]
    end
    on_open('ZADD', OPEN, unpack(renewed))
    write('PEXPIRE', OPEN, lease + 1000)
  end
end
if fault then return {-1, fault} end
return {refused, wait, math.floor(level[1] * 1000), math.floor(level[2] * 1000), math.floor(level[3] * 1000)}
