-- Record a stream's state. ARGV: stream, epoch, state, reason, degraded ('' leaves it). A stale epoch changes nothing.
local key = stream_key(ARGV[1])
local now = call('HMGET', key, 'epoch', 'state', 'reason')
if now[1] ~= ARGV[2] then return 0 end
if ARGV[5] ~= '' then call('HSET', key, 'degraded', ARGV[5]) end
if now[2] ~= ARGV[3] or now[3] ~= ARGV[4] then
  call('HSET', key, 'state', ARGV[3], 'reason', ARGV[4])
  bump()
end
return 1
