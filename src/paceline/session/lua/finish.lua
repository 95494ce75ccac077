-- The end of a generation. ARGV: epoch, owner, state, finish reason, expiry in ms
local refused = refusal(ARGV[1], ARGV[2])
if refused then
  return refused
end
extend(ARGV[5])
local before = redis.call('HMGET', KEYS[1], 'state', 'finish_reason')
if before[1] == ARGV[3] and before[2] == ARGV[4] then
  return 'already_applied'
end
redis.call('HSET', KEYS[1], 'state', ARGV[3], 'finish_reason', ARGV[4])
return 'applied'
