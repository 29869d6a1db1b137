-- Record a stream's state. ARGV: stream, fence, epoch, state, reason. A stale epoch changes nothing.
-- Returns {1}, {0}: another epoch, or {-1}: not yours.
local key = stream_key(ARGV[1])
if not may_write(key, ARGV[2]) then return {-1} end
local now = call('HMGET', key, 'epoch', 'state', 'reason')
if now[1] ~= ARGV[3] then return {0} end
if now[2] ~= ARGV[4] or now[3] ~= ARGV[5] then
  call('HSET', key, 'state', ARGV[4], 'reason', ARGV[5])
  bump()
end
return {1}
