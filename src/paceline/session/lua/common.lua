-- Put before every script. KEYS[1] is the record's hash, KEYS[2] its tokens: packed little-endian int32.

-- Epochs are compared as decimal strings: Lua's numbers lose the last digits of 64-bit ones.
local function is_older(left, right)
  return #left < #right or (#left == #right and left < right)
end

local function extend(expiry_ms)
  redis.call('PEXPIRE', KEYS[1], expiry_ms)
  redis.call('PEXPIRE', KEYS[2], expiry_ms)
end

-- The record's epoch if the writer owns it, else nil and the outcome. A record with an older epoch than the writer's is
-- one that the writer's own was lost to: it has to be written as a whole.
local function owned(writer_epoch)
  local epoch = redis.call('HGET', KEYS[1], 'epoch')
  if not epoch then
    return nil, 'missing'
  elseif is_older(writer_epoch, epoch) then
    return nil, 'fenced'
  elseif epoch ~= writer_epoch then
    return nil, 'missing'
  end
  return epoch
end

-- Replaces the whole record by ARGV from `first` on: field, value, field, value, ...
local function write_record(tokens, expiry_ms, first)
  redis.call('DEL', KEYS[1], KEYS[2])
  redis.call('HSET', KEYS[1], unpack(ARGV, first))
  redis.call('SET', KEYS[2], tokens)
  extend(expiry_ms)
end
