-- The whole record of a live owner. ARGV: epoch, owner, tenant, tokens, expiry in ms, field, value, ...
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant and (tenant ~= ARGV[3] or refusal(ARGV[1], ARGV[2]) == 'fenced') then
  return 'fenced'
end
write_record(ARGV[4], ARGV[5], 6)
return 'applied'
