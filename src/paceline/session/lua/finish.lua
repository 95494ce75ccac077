-- The end of a generation. ARGV: epoch, state, finish reason, expiry in ms
local epoch, refusal = owned(ARGV[1])
if not epoch then
  return refusal
end
extend(ARGV[4])
local before = redis.call('HMGET', KEYS[1], 'state', 'finish_reason')
if before[1] == ARGV[2] and before[2] == ARGV[3] then
  return 'already_applied'
end
redis.call('HSET', KEYS[1], 'state', ARGV[2], 'finish_reason', ARGV[3])
return 'applied'
