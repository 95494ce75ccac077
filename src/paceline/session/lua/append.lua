-- Tokens that became final. ARGV: epoch, owner, from_len, tokens, expiry in ms, field, value, ... (positions)
local refused = refusal(ARGV[1], ARGV[2])
if refused then
  return refused
end

-- All lengths in bytes from here on; [from, till) is what the writer wants the record to hold.
local tokens = ARGV[4]
local from = tonumber(ARGV[3]) * 4
local till = from + #tokens
local have = redis.call('STRLEN', KEYS[2])
if have < from or have ~= tonumber(redis.call('HGET', KEYS[1], 'committed_len')) * 4 then
  return 'missing'
end

-- A retried call, or one whose first part has arrived before, finds its own tokens there.
local overlap = math.min(have, till) - from
if overlap > 0 and redis.call('GETRANGE', KEYS[2], from, from + overlap - 1) ~= string.sub(tokens, 1, overlap) then
  return 'missing'
end
extend(ARGV[5])
if have > till or (have == till and #tokens > 0) then
  return 'already_applied'
end

redis.call('APPEND', KEYS[2], string.sub(tokens, overlap + 1))
redis.call('HSET', KEYS[1], 'committed_len', string.format('%d', till / 4), unpack(ARGV, 6))
return 'applied'
