-- Make sure that a stream is registered. ARGV: stream, endpoint, rank, random nonce. Returns its fields.
local key = stream_key(ARGV[1])
call('HSETNX', REGISTRY, 'nonce', ARGV[4])
if call('EXISTS', key) == 0 then
  call('HSET', key, 'endpoint', ARGV[2], 'rank', ARGV[3], 'state', 'replaying', 'reason', '')
  new_epoch(key, -1)
  call('SADD', STREAMS, ARGV[1])
  bump()
end
return call('HGETALL', key)
