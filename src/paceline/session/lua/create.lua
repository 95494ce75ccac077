-- A new record. ARGV: id of this call, tokens, expiry in ms, field, value, ...
if redis.call('EXISTS', KEYS[1]) == 1 then
  -- The same call once more, repeated because its answer was lost.
  return redis.call('HGET', KEYS[1], 'created_by') == ARGV[1] and 'applied' or 'exists'
end
write_record(ARGV[2], ARGV[3], 4)
redis.call('HSET', KEYS[1], 'created_by', ARGV[1])
return 'applied'
