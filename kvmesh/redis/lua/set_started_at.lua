-- Record when the publisher's process started. ARGV: stream, fence, seconds. Returns {1}, or {-1}: not yours.
local key = stream_key(ARGV[1])
if not may_write(key, ARGV[2]) then return {-1} end
call('HSET', key, 'started_at', ARGV[3])
return {1}
