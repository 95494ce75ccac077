-- Put before every script. KEYS[1] is the record's hash, KEYS[2] its tokens: packed little-endian int32.

-- Epochs are compared as decimal strings: Lua's numbers lose the last digits of 64-bit ones.
local function is_older(left, right)
  return #left < #right or (#left == #right and left < right)
end

local function extend(expiry_ms)
  redis.call('PEXPIRE', KEYS[1], expiry_ms)
  redis.call('PEXPIRE', KEYS[2], expiry_ms)
end

-- What keeps the writer from the record, or nil if it owns it. A record with an older epoch than the writer's is one that
-- the writer's own was lost to: it has to be written as a whole. The same epoch and another owner are two that took the
-- name one after the other, since the first one's record was lost.
local function refusal(writer_epoch, writer_owner)
  local record = redis.call('HMGET', KEYS[1], 'epoch', 'owner')
  local epoch, owner = record[1], record[2]
  if not epoch or is_older(epoch, writer_epoch) then
    return 'missing'
  elseif epoch ~= writer_epoch or owner ~= writer_owner then
    return 'fenced'
  end
  return nil
end

-- Replaces the whole record by ARGV from `first` on: field, value, field, value, ...
local function write_record(tokens, expiry_ms, first)
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], unpack(ARGV, first))
  redis.call('SET', KEYS[2], tokens)
  extend(expiry_ms)
end
