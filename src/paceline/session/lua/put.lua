-- The whole record of a live owner. ARGV: epoch, tokens, expiry in ms, field, value, ...
local epoch = redis.call('HGET', KEYS[1], 'epoch')
if epoch and is_older(ARGV[1], epoch) then
  return 'fenced'
end
write_record(ARGV[2], ARGV[3], 4)
return 'applied'
