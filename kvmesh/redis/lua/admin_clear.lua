-- Void all that a stream has claimed, whoever follows it: an operator asks for it, so there is no claim to check.
-- ARGV: stream. Its owner finds another epoch at its next change or check, and replays from 0 into it.
-- Returns the new epoch, 0 if the stream is unknown.
local key = stream_key(ARGV[1])
if call('HEXISTS', key, 'epoch') == 0 then return 0 end
local epoch = new_epoch(key, -1)
call('HSET', key, 'state', 'replaying', 'reason', 'cleared-by-hand')
call('HDEL', key, 'groups')
bump()
return epoch
