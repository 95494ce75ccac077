-- The whole record of a live owner. ARGV: epoch, owner, tenant, state, tokens, expiry in ms, field, value, ...
local tenant = redis.call('HGET', KEYS[1], 'tenant')
if tenant then
  local refused = refusal(ARGV[1], ARGV[2])
  -- A generation that has ended takes its name from nobody, not even from one that counts epochs anew since it was lost.
  if tenant ~= ARGV[3] or refused == 'fenced' or (refused and ARGV[4] ~= 'running') then
    return 'fenced'
  end
end
write_record(ARGV[5], ARGV[6], 7)
return 'applied'
