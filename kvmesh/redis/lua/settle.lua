-- Change who has some streams, each only if it is still as it was when that was decided.
-- ARGV: indexer, lease ms, then per stream: what to do, name.
--   adopt     a stream that it could follow and that `streams` lacks: register it, or void what is left of it
--   take      if nobody has it
--   give      back, if it is ours
--   bury      what no indexer lists, if nobody has it or it is ours, and it is no other stream's record
--   unfollow  if nobody has it: say that nobody keeps it true
-- Returns {name, fence, …} of what was taken.
local me, lease, now = ARGV[1], tonumber(ARGV[2]), now_ms()

local function adopt(name, key)
  if call('SISMEMBER', STREAMS, name) == 1 then return end
  local endpoint, rank = string.match(name, '^(.*)#(%d+)$')
  local record = redis.pcall('HMGET', key, 'endpoint', 'rank', 'epoch', 'fence')
  if not record.err and record[1] == endpoint and record[2] == rank and tonumber(record[3]) and tonumber(record[4]) then
    rebuild(key)
  elseif call('EXISTS', key) == 1 then
    return -- somebody else's
  else
    call('HSET', key, 'endpoint', endpoint, 'rank', rank, 'state', 'replaying', 'reason', '', 'owner', '', 'fence', 0,
      'lease_until', format('%.0f', now), 'applied_at', 0, 'events', 0)
    new_epoch(key, -1)
  end
  call('SADD', STREAMS, name)
end

-- Greater than all before, also after Redis was emptied or has failed over to a replica that lags.
local function next_fence()
  local fence = format('%.0f', math.max((tonumber(call('HGET', REGISTRY, 'fences')) or 0) + 1, now))
  call('HSET', REGISTRY, 'fences', fence)
  return fence
end

local taken, beats = {}, pulses()
for i = 3, #ARGV, 2 do
  local action, name, key = ARGV[i], ARGV[i + 1], stream_key(ARGV[i + 1])
  if action == 'adopt' then
    adopt(name, key)
  else
    local record = redis.pcall('HMGET', key, 'endpoint', 'owner', 'lease_until', 'epoch', 'state')
    local is_readable = not record.err and record[1] and record[4]
    local is_free = is_readable and lease_end(beats, record[2], record[3], me) <= now
    local is_ours = is_readable and not is_free and record[2] == me
    if action == 'take' and is_free then
      local fence = next_fence()
      call('HSET', key, 'owner', me, 'fence', fence, 'lease_until', format('%.0f', now + lease))
      if record[5] ~= 'lost' then -- what it claims is of the past until its new follower says otherwise
        call('HSET', key, 'state', 'replaying', 'reason', '')
        bump()
      end
      taken[#taken + 1] = name
      taken[#taken + 1] = fence
    elseif action == 'give' and is_ours then
      call('HSET', key, 'owner', '', 'lease_until', format('%.0f', now))
    elseif action == 'bury' and (is_free or is_ours) and string.match(name, '^(.*)#%d+$') == record[1] then
      retire(key)
      call('DEL', key)
      call('SREM', STREAMS, name)
    elseif action == 'unfollow' and is_free and record[5] ~= 'lost' then
      call('HSET', key, 'state', 'lost', 'reason', 'not-followed')
      bump()
    end
  end
end
return taken
