-- Give all of an indexer's streams back. Its endpoints stay listed for a while: it may just be restarted.
-- ARGV: indexer.
local now = now_ms()
for _, name in ipairs(call('SMEMBERS', STREAMS)) do
  local owner = redis.pcall('HGET', stream_key(name), 'owner')
  if owner == ARGV[1] then call('HSET', stream_key(name), 'owner', '', 'lease_until', format('%.0f', now)) end
end
local readable, record = pcall(cjson.decode, call('HGET', INDEXERS, ARGV[1]) or '')
if readable and type(record) == 'table' then
  local endpoints = #record.endpoints > 0 and cjson.encode(record.endpoints) or '[]'
  call('HSET', INDEXERS, ARGV[1], format('{"until_ms":%.0f,"endpoints":%s,"streams":[]}', now, endpoints))
end
return {1}
