-- Which other streams hold these engine hashes in group 0, among some slots: the caller asks in slices, so that no call
-- holds Redis for long. ARGV: stream (left out), packed engine hashes, then the slots.
-- Returns a list of {endpoint, rank, {value or false, …}}, one a source that holds any. Writes nothing.
local fields, found = {}, {}
for i = 1, #ARGV[2], 8 do fields[#fields + 1] = sub(ARGV[2], i, i + 7) end
local records = call('HMGET', SLOTS, unpack(ARGV, 3))
for i, text in ipairs(records) do
  local record, slot = slot_record(text), slot_number(ARGV[i + 2])
  local believed = record and record.state == 'live' and slot
  local endpoint, rank = believed and tostring(record.endpoint), believed and tonumber(record.rank)
  if endpoint and rank and endpoint .. '#' .. rank ~= ARGV[1] then
    local values, any = redis.pcall('HMGET', held_key(slot), unpack(fields)), false
    for _, value in ipairs(values) do any = any or value end
    if any then found[#found + 1] = {endpoint, rank, values} end
  end
end
return found
