-- Another owner under a newer epoch. ARGV: id of this call, epoch and owner as they were seen, new epoch, new owner,
-- expiry in ms
local refused = refusal(ARGV[2], ARGV[3])
if refused then
  if redis.call('HGET', KEYS[1], 'taken_by') == ARGV[1] then
    return 'applied' -- the same call once more, repeated because its answer was lost
  end
  return refused
end
redis.call('HSET', KEYS[1], 'epoch', ARGV[4], 'owner', ARGV[5], 'state', 'running', 'finish_reason', '')
redis.call('HSET', KEYS[1], 'taken_by', ARGV[1])
extend(ARGV[6])
return 'applied'
