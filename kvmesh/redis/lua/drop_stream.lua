-- Forget a stream; its slots wait for their sweep. ARGV: stream, fence. Returns {1}, or {-1}: not yours.
local key = stream_key(ARGV[1])
if not may_write(key, ARGV[2]) then return {-1} end
retire(key)
call('DEL', key)
call('SREM', STREAMS, ARGV[1])
return {1}
