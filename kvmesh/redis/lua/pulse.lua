-- Say that an indexer lives, several times in each of its pulses. ARGV: indexer, ms that its pulse lasts.
-- Returns the names of the others whose pulse has ended: what they follow is free.
local now, still = now_ms(), {}
pulse(now, ARGV[1], ARGV[2])
for indexer, ends in pairs(pulses()) do
  if ends <= now then still[#still + 1] = indexer end
end
return still
