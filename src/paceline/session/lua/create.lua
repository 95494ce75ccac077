-- A new record. ARGV: tokens, expiry in ms, field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 'exists'
end
write_record(ARGV[1], ARGV[2], 3)
return 'applied'
