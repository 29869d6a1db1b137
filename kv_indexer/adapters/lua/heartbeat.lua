-- Say that an indexer is alive and can write. ARGV: seconds until that is no longer believed.
redis.call('SET', KEYS[1] .. 'heartbeat', redis.call('TIME')[1], 'EX', ARGV[1])
