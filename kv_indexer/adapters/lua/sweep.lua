-- Clean one slice of one slot that is no longer believed, and free the slot once it is empty.
-- ARGV: cursor of the slice before ('0' to begin), fields a slice.
-- Returns {slot, cursor for the next slice, fields removed}, or {} when nothing waits. Records that cannot be read, and
-- slots whose blocks are of another type, are left alone: they are not ours to clean.
local waiting
local slots = call('HGETALL', SLOTS)
for i = 1, #slots, 2 do
  local slot, readable, record = slot_number(slots[i]), pcall(cjson.decode, slots[i + 1])
  local void = readable and type(record) == 'table' and record.state == 'sweeping'
  if slot and void and (not waiting or slot < waiting) then
    local kind = call('TYPE', P .. 'h:' .. slot).ok
    if kind == 'hash' or kind == 'none' then waiting = slot end
  end
end
if not waiting then return {} end
local held_key = P .. 'h:' .. waiting
local page = call('HSCAN', held_key, ARGV[1], 'COUNT', ARGV[2])
local fields, names = {}, {}
for i = 1, #page[2], 2 do
  fields[#fields + 1] = page[2][i]
  names[#names + 1] = P .. 'b:' .. sub(page[2][i + 1], 1, 8)
end
for first = 1, #fields, 1000 do
  local last = math.min(first + 999, #fields)
  clear_bits(waiting, {unpack(names, first, last)})
  call('HDEL', held_key, unpack(fields, first, last))
end
if call('EXISTS', held_key) == 0 then
  call('HDEL', SLOTS, waiting)
  page[1] = '0'
end
return {waiting, page[1], #fields}
