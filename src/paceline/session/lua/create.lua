-- The first record of a generation. ARGV: id of this call, epoch, tenant, tokens, expiry in ms, field, value, ...
local before = redis.call('HMGET', KEYS[1], 'epoch', 'tenant', 'state', 'created_by')
local epoch, tenant, state, created_by = before[1], before[2], before[3], before[4]
if epoch then
  if created_by == ARGV[1] then
    return 'applied' -- the same call once more, repeated because its answer was lost
  elseif tenant ~= ARGV[3] then
    return 'foreign'
  elseif state == 'running' or not is_older(epoch, ARGV[2]) then
    return 'busy'
  end
end
write_record(ARGV[4], ARGV[5], 6)
redis.call('HSET', KEYS[1], 'created_by', ARGV[1])
return 'applied'
