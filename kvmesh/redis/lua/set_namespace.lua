-- Record what the stream's block keys begin with. ARGV: stream, fence, namespace. Returns {1}, or {-1}: not yours.
local key = stream_key(ARGV[1])
if not may_write(key, ARGV[2]) then return {-1} end
call('HSET', key, 'namespace', ARGV[3])
return {1}
