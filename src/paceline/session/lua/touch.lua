-- No progress, but the record must live on. ARGV: epoch, owner, expiry in ms
local refused = refusal(ARGV[1], ARGV[2])
if refused then
  return refused
end
extend(ARGV[3])
return 'applied'
