-- Forget a stream; its slots wait for their sweep. ARGV: stream.
local key = stream_key(ARGV[1])
if call('EXISTS', key) == 1 then
  retire(key)
  call('DEL', key)
end
return call('SREM', STREAMS, ARGV[1])
