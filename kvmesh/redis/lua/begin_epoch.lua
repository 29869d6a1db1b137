-- Void all that a stream has claimed. ARGV: stream, fence, expected epoch, last seq of the new epoch, why it is degraded
-- or ''. Whoever comes second (expected epoch gone) changes nothing. Returns {1, the stream's fields}, or {-1}: not yours.
local key = stream_key(ARGV[1])
if not may_write(key, ARGV[2]) then return {-1} end
if call('HGET', key, 'epoch') == ARGV[3] then
  new_epoch(key, ARGV[4])
  call('HSET', key, 'degraded', ARGV[5])
  call('HDEL', key, 'groups') -- another process may have others; `started_at` stays until the new one is known
end
return {1, call('HGETALL', key)}
