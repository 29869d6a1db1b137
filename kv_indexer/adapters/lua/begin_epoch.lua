-- Void all that a stream has claimed. ARGV: stream, expected epoch, last seq of the new epoch, why it is degraded or ''.
-- Whoever comes second (expected epoch gone) changes nothing. Returns the stream's fields, empty if it is unknown.
local key = stream_key(ARGV[1])
if call('HGET', key, 'epoch') == ARGV[2] then
  new_epoch(key, ARGV[3])
  call('HSET', key, 'degraded', ARGV[4])
end
return call('HGETALL', key)
