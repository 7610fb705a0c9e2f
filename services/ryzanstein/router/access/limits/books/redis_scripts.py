"""The atomic operations on one tenant's limits in Redis, as Lua (Redis 5 and later).

All times are the server's. Keys of a tenant, under the prefix and with its digest as hash tag: `requests` and
`tokens`, when these buckets are full again, in microseconds since the start of 2025 (absent: they are
full); `holds`, the generations that run, by the time until which they count without a renewal; `counted`,
a hash that says for each generation what it was charged, what is reserved for its prompt, and what of it is
in the month; `known`, until when that is kept; `reserved`, the sum of what is reserved. `usage:…:MONTH` is a
hash with the counts. The buckets compute as `gcra` does, in the same order.

KEYS are what the names of the limits and of the months begin with. Arguments are words in ARGV[1], which cost
less than arguments of their own.
"""

from __future__ import annotations

from ryzanstein.router.access.limits.gcra import EPOCH_S, MAX_DEBT_US

USAGE_KEEP_MS = 400 * 24 * 3600 * 1000

CLOCK = "local time = redis.call('TIME')"
"""Tests have another one, and another `KEEP`."""
KEEP = "redis.call('PEXPIRE', key, ms)"

# The month is of the proleptic Gregorian calendar, by Howard Hinnant's civil_from_days.
_PRELUDE = f"""
{CLOCK}
local now = (time[1] - {EPOCH_S}) * 1000000 + time[2]
local now_ms = math.floor(now / 1000)
local requests_key, tokens_key, holds = KEYS[1] .. 'requests', KEYS[1] .. 'tokens', KEYS[1] .. 'holds'
local counted, known, reserved_key = KEYS[1] .. 'counted', KEYS[1] .. 'known', KEYS[1] .. 'reserved'
local args = {{}}
for word in string.gmatch(ARGV[1], '%S+') do args[#args + 1] = word end
local function keep(key, ms) {KEEP} end
local function whole(number) return string.format('%.0f', number) end
local function month_of(seconds)
    local days = math.floor(seconds / 86400) + 719468
    local era = math.floor(days / 146097)
    local of_era = days - era * 146097
    local leap_days = math.floor(of_era / 1460) - math.floor(of_era / 36524) + math.floor(of_era / 146096)
    local year = math.floor((of_era - leap_days) / 365)
    local of_year = of_era - (365 * year + math.floor(year / 4) - math.floor(year / 100))
    local shifted = math.floor((5 * of_year + 2) / 153)
    local month = shifted < 10 and shifted + 3 or shifted - 9
    return string.format('%04d-%02d', year + era * 400 + (month <= 2 and 1 or 0), month)
end
local month = month_of(time[1])
local usage = KEYS[2] .. month
local function used()
    local counts = redis.call('HMGET', usage, 'prompt', 'generated')
    return tonumber(counts[1] or '0') + tonumber(counts[2] or '0')
end
local function full_at(key) return tonumber(redis.call('GET', key) or '0') end
local function fill(key, at)
    if at > now then
        redis.call('SET', key, string.format('%.17g', at))
        keep(key, math.ceil((at - now) / 1000))
    else
        redis.call('DEL', key)
    end
end
local function charged(at, cost, interval, burst)
    return math.min(math.max(now, at) + cost * interval, now + burst * interval + {MAX_DEBT_US:.0f})
end
local function wait(at, cost, interval, burst)
    return math.max(now, at) + math.min(cost, burst) * interval - burst * interval - now
end
local function read(id)
    local row = redis.call('HGET', counted, id)
    if not row then return nil end
    local charge, reserved, requests, prompt, generated = string.match(row, '(%d+) (%d+) (%d+) (%d+) (%d+)')
    return {{tonumber(charge), tonumber(reserved), tonumber(requests), tonumber(prompt), tonumber(generated)}}
end
local function write(id, row, keep_ms)
    for i = 1, 5 do row[i] = whole(row[i]) end
    redis.call('HSET', counted, id, table.concat(row, ' '))
    redis.call('ZADD', known, now_ms + keep_ms, id)
end
local function reserve(tokens)
    if tokens ~= 0 then redis.call('INCRBY', reserved_key, whole(tokens)) end
end
local function kept(hold_ms, keep_ms)
    keep(holds, 2 * hold_ms)
    keep(counted, 2 * keep_ms)
    keep(known, 2 * keep_ms)
    keep(reserved_key, 2 * keep_ms)
end
-- Holds that nobody renews count no more, and what is known for long enough is forgotten.
local function sweep()
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', holds, '-inf', now_ms, 'LIMIT', 0, 100)) do
        redis.call('ZREM', holds, id)
        local row = read(id)
        if row and row[2] > 0 then
            reserve(-row[2])
            row[2] = 0
            for i = 1, 5 do row[i] = whole(row[i]) end
            redis.call('HSET', counted, id, table.concat(row, ' '))
        end
    end
    for _, id in ipairs(redis.call('ZRANGEBYSCORE', known, '-inf', now_ms, 'LIMIT', 0, 100)) do
        redis.call('ZREM', known, id)
        redis.call('HDEL', counted, id)
    end
end
local function answer(refused, wait_us)
    local requests, tokens = math.max(0, full_at(requests_key) - now), math.max(0, full_at(tokens_key) - now)
    local running = redis.call('ZCOUNT', holds, '(' .. now_ms, '+inf')
    return string.format('%d %.0f %.17g %.17g %d %.0f', refused, wait_us, requests, tokens, running, used())
end
"""

# Words: id, estimate, hold_ms, keep_ms, then interval and burst of requests, interval and burst of tokens, concurrent,
# tokens of the month; -1: no limit. Returns as words the number of the limit that refuses or 0, when to come back,
# when the buckets are full, how many run, and the tokens of the month.
ADMIT = (
    _PRELUDE
    + """
local id, estimate, hold_ms, keep_ms = args[1], tonumber(args[2]), tonumber(args[3]), tonumber(args[4])
local interval, burst, token_interval, token_burst = tonumber(args[5]), tonumber(args[6]), tonumber(args[7]), tonumber(args[8])
local concurrent, most = tonumber(args[9]), tonumber(args[10])
sweep()
if read(id) then return answer(0, 0) end
if most >= 0 and used() + tonumber(redis.call('GET', reserved_key) or '0') + estimate > most then return answer(4, 0) end
if concurrent >= 0 and redis.call('ZCOUNT', holds, '(' .. now_ms, '+inf') >= concurrent then return answer(3, 0) end
if interval >= 0 then
    local wait_us = wait(full_at(requests_key), 1, interval, burst)
    if wait_us > 0 then return answer(1, wait_us) end
end
if token_interval >= 0 then
    local wait_us = wait(full_at(tokens_key), estimate, token_interval, token_burst)
    if wait_us > 0 then return answer(2, wait_us) end
end
if interval >= 0 then fill(requests_key, charged(full_at(requests_key), 1, interval, burst)) end
if token_interval >= 0 then fill(tokens_key, charged(full_at(tokens_key), estimate, token_interval, token_burst)) end
redis.call('ZADD', holds, now_ms + hold_ms, id)
write(id, {estimate, estimate, 0, 0, 0}, keep_ms)
reserve(estimate)
kept(hold_ms, keep_ms)
return answer(0, 0)
"""
)

# ARGV[2]: tenant. Words: hold_ms, keep_ms, interval of requests and its burst, interval of tokens and its burst (-1: no limit),
# usage_keep_ms, then of each generation: id, live, confirmed, refund, spent (each 0 or 1), requests, prompt, generated, and
# what of the last three is known to be counted. Returns the month and its tokens.
REPORT = (
    _PRELUDE
    + """
local hold_ms, keep_ms = tonumber(args[1]), tonumber(args[2])
local interval, burst, token_interval, token_burst = tonumber(args[3]), tonumber(args[4]), tonumber(args[5]), tonumber(args[6])
local charge, refunds, more = 0, 0, {0, 0, 0}
sweep()
for i = 8, #args, 11 do
    local id, live, confirmed = args[i], args[i + 1] == '1', args[i + 2] == '1'
    local refund, spent = args[i + 3] == '1', args[i + 4] == '1'
    local row = read(id)
    if not row then
        row = {0, 0, tonumber(args[i + 8]), tonumber(args[i + 9]), tonumber(args[i + 10])}
        row[1] = row[4] + row[5]
    end
    for j = 1, 3 do
        local new = math.max(row[2 + j], tonumber(args[i + 4 + j]))
        more[j] = more[j] + new - row[2 + j]
        row[2 + j] = new
    end
    if (confirmed or not live) and row[2] > 0 then
        reserve(-row[2])
        row[2] = 0
    end
    local target = row[2] + row[4] + row[5]
    if not spent then charge = charge + target - row[1] end
    row[1] = target
    if live then
        redis.call('ZADD', holds, now_ms + hold_ms, id)
    elseif redis.call('ZREM', holds, id) == 1 and refund then
        refunds = refunds + 1
    end
    write(id, row, keep_ms)
end
if charge ~= 0 and token_interval >= 0 then
    fill(tokens_key, charged(full_at(tokens_key), charge, token_interval, token_burst))
end
if refunds > 0 and interval >= 0 then fill(requests_key, charged(full_at(requests_key), -refunds, interval, burst)) end
for j, name in ipairs({'requests', 'prompt', 'generated'}) do
    if more[j] > 0 then redis.call('HINCRBY', usage, name, whole(more[j])) end
end
if more[1] + more[2] + more[3] > 0 then
    redis.call('HSET', usage, 'tenant', ARGV[2])
    keep(usage, tonumber(args[7]))
end
kept(hold_ms, keep_ms)
return {month, whole(used())}
"""
)

# KEYS routers  ARGV: router id, how long it is known in ms. Returns how many routers there are.
ATTEND = f"""
{CLOCK}
local now_ms = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now_ms)
redis.call('ZADD', KEYS[1], now_ms + ARGV[2], ARGV[1])
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return redis.call('ZCARD', KEYS[1])
"""
