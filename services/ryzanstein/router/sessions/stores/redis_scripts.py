"""The atomic operations of the Redis store, as Lua (Redis 5 and later).

The times of sessions and claims come from the server's clock.

Keys, under the prefix: `session:ID` a hash, `messages:ID` a list of JSON, `turns:ID` the set of
generations that are in it, `claim:ID` a hash that expires with the claim, `claimed:ID` the same hash
kept for longer, `sessions` the ids by time of use. Those of kept responses are in `responses` by time
of use, or in `linked` while another response continues them, and those of their objects in `objects`.
`owned:tenant:NAME` has the ids of a tenant's sessions by time of use, of nobody's with an empty name,
and `owned:response:DIGEST` those of its kept responses and their objects. Routers of an earlier version
know neither: `LIST` and `OWN` mend them. What a response continues is its field `parent`; it has as many
`children`, and is `deleted` if only these need it. Each change is published on `changed`, with origin and
id. Routers of an earlier version do not know `claimed`, `responses` and the field `tenant` of a session. Those of the one
before this have objects in `responses`, too, and know nothing of chains: what they evict is in
`responses`, so never what others continue.
"""

from __future__ import annotations

_NOW = """
local time = redis.call('TIME')
local now = time[1] .. '.' .. string.format('%06d', time[2])
"""

# Removes a session; a response with its object and the deleted ones that only it continued.
# Returns how many.
_REMOVE = """
local function forget(prefix, id)
    local tenant = redis.call('HGET', prefix .. 'session:' .. id, 'tenant') or ''
    redis.call('ZREM', prefix .. 'owned:tenant:' .. tenant, id)
    redis.call('ZREM', prefix .. 'owned:response:' .. string.sub(id, 1, 16), id)
    for _, by_use in ipairs({'sessions', 'responses', 'linked', 'objects'}) do redis.call('ZREM', prefix .. by_use, id) end
    redis.call('DEL', prefix .. 'messages:' .. id, prefix .. 'turns:' .. id)
    return redis.call('DEL', prefix .. 'session:' .. id)
end
local function unneeded(prefix, parent)
    local key = prefix .. 'session:' .. parent
    if redis.call('EXISTS', key) == 0 or redis.call('HINCRBY', key, 'children', -1) > 0 then return nil end
    if redis.call('HEXISTS', key, 'deleted') == 1 then return parent end
    redis.call('ZREM', prefix .. 'linked', parent)
    redis.call('ZADD', prefix .. 'responses', redis.call('HGET', key, 'update_time'), parent)
    return nil
end
local function remove(prefix, id, mark)
    local removed = 0
    while id do
        local parent = redis.call('HGET', prefix .. 'session:' .. id, 'parent')
        removed = removed + forget(prefix, id)
        if mark ~= '' then removed = removed + forget(prefix, id .. mark) end
        id = parent and unneeded(prefix, parent)
    end
    return removed
end
"""

# KEYS session messages sessions changed
# ARGV id model nonce most prefix origin tenant parent needed mark most_evicted owner share, then the messages
# `needed`: the response without which it is not created; `mark`: what ends the ids of objects, empty for a
# conversation. `owner`: what its tenant's are listed by, after `owned:`; above `share` of these the oldest of its own go,
# 0: never. Returns {time, evicted}, {} when the id is taken, or {'gone'} without what is needed.
CREATE = (
    _NOW
    + _REMOVE
    + """
if redis.call('EXISTS', KEYS[1]) == 1 then
    if redis.call('HGET', KEYS[1], 'nonce') == ARGV[3] then
        return {redis.call('HGET', KEYS[1], 'create_time'), 0}
    end
    return {}
end
local prefix, parent, needed, mark = ARGV[5], ARGV[8], ARGV[9], ARGV[10]
local own = prefix .. 'owned:' .. ARGV[12]
if needed ~= '' then
    local key = prefix .. 'session:' .. needed
    if redis.call('EXISTS', key) == 0 or redis.call('HEXISTS', key, 'deleted') == 1 then return {'gone'} end
end
if parent ~= '' then
    redis.call('HSET', prefix .. 'session:' .. parent, 'update_time', now)
    redis.call('HINCRBY', prefix .. 'session:' .. parent, 'children', 1)
    redis.call('ZREM', prefix .. 'responses', parent)
    redis.call('ZADD', prefix .. 'linked', now, parent)
    redis.call('ZADD', own, now, parent)
    redis.call('HSET', KEYS[1], 'parent', parent)
end
redis.call('HSET', KEYS[1], 'model', ARGV[2], 'create_time', now, 'update_time', now, 'node_id', '',
    'nonce', ARGV[3], 'num_messages', #ARGV - 13)
if ARGV[7] ~= '' then redis.call('HSET', KEYS[1], 'tenant', ARGV[7]) end
for i = 14, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('ZADD', KEYS[3], now, ARGV[1])
redis.call('ZADD', own, now, ARGV[1])
-- From the oldest on, but not the new one, which is the oldest by a clock that was set back, nor one that is claimed
-- or that another response continues. An object goes with its response.
local most = tonumber(ARGV[11])
local function evict(by_use, surplus)
    local stay, evicted = 0, 0
    while surplus > 0 and evicted < most and stay < most do
        local id = redis.call('ZRANGE', by_use, stay, stay)[1]
        if not id then break end
        if id == ARGV[1] or id == needed or redis.call('EXISTS', prefix .. 'claim:' .. id) == 1
            or redis.call('ZSCORE', prefix .. 'linked', id)
            or (by_use == own and mark ~= '' and string.sub(id, -#mark) == mark) then
            stay = stay + 1
        else
            redis.call('ZREM', by_use, id)
            surplus = surplus - remove(prefix, id, mark)
            evicted = evicted + 1
        end
    end
    return evicted
end
local evicted, share = 0, tonumber(ARGV[13])
if share > 0 then evicted = evict(own, redis.call('ZCARD', own) - share) end
local by_use, surplus = KEYS[3], -tonumber(ARGV[4])
if mark == '' then
    surplus = surplus + redis.call('ZCARD', by_use)
else
    by_use = prefix .. 'responses'
    for _, each in ipairs({'responses', 'linked', 'objects'}) do surplus = surplus + redis.call('ZCARD', prefix .. each) end
end
evicted = evicted + evict(by_use, surplus)
redis.call('PUBLISH', KEYS[4], ARGV[6] .. ' ' .. ARGV[1])
return {now, evicted}
"""
)

# KEYS session messages turns sessions claim changed claimed
# ARGV id generation_id model node_id origin prefix, then the messages
# Returns 0 when there is no such session, 1 when it has the turn already, 2 when it was added.
APPEND = (
    _NOW
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
if ARGV[2] ~= '' then
    for _, key in ipairs({KEYS[5], KEYS[7]}) do
        if redis.call('HGET', key, 'generation_id') == ARGV[2] then redis.call('DEL', key) end
    end
    if redis.call('SADD', KEYS[3], ARGV[2]) == 0 then return 1 end
end
if redis.call('HGET', KEYS[1], 'model') == '' then redis.call('HSET', KEYS[1], 'model', ARGV[3]) end
redis.call('HSET', KEYS[1], 'update_time', now, 'node_id', ARGV[4])
redis.call('HINCRBY', KEYS[1], 'num_messages', #ARGV - 6)
for i = 7, #ARGV do redis.call('RPUSH', KEYS[2], ARGV[i]) end
redis.call('ZADD', KEYS[4], now, ARGV[1])
redis.call('ZADD', ARGV[6] .. 'owned:tenant:' .. (redis.call('HGET', KEYS[1], 'tenant') or ''), now, ARGV[1])
redis.call('PUBLISH', KEYS[6], ARGV[5] .. ' ' .. ARGV[1])
return 2
"""
)

# KEYS session changed
# ARGV id origin prefix mark
# Returns 0 when there is no such session, or it was deleted.
DELETE = (
    _REMOVE
    + """
if redis.call('EXISTS', KEYS[1]) == 0 or redis.call('HEXISTS', KEYS[1], 'deleted') == 1 then return 0 end
if tonumber(redis.call('HGET', KEYS[1], 'children') or '0') > 0 then
    redis.call('HSET', KEYS[1], 'deleted', '1')
else
    remove(ARGV[3], ARGV[1], ARGV[4])
end
redis.call('PUBLISH', KEYS[2], ARGV[2] .. ' ' .. ARGV[1])
return 1
"""
)

# KEYS owned
# ARGV update_time id count prefix
# Returns how many ids follow that position in the descending order of (update_time, id), at most `count`, and their
# sessions. One that a router of an earlier version deleted or used is put right: {-1} then, and the caller asks again.
LIST = """
local first = redis.call('ZCOUNT', KEYS[1], '(' .. ARGV[1], '+inf')
for _, id in ipairs(redis.call('ZRANGEBYSCORE', KEYS[1], ARGV[1], ARGV[1])) do
    if id >= ARGV[2] then first = first + 1 end
end
local found, wrong = {}, false
local ids = redis.call('ZREVRANGE', KEYS[1], first, first + tonumber(ARGV[3]) - 1, 'WITHSCORES')
for i = 1, #ids, 2 do
    local id = ids[i]
    local fields = redis.call('HMGET', ARGV[4] .. 'session:' .. id, 'model', 'create_time', 'update_time', 'node_id', 'tenant')
    if not fields[1] then
        redis.call('ZREM', KEYS[1], id)
        wrong = true
    elseif tonumber(fields[3]) ~= tonumber(ids[i + 1]) then
        redis.call('ZADD', KEYS[1], fields[3], id)
        wrong = true
    else
        table.insert(found, {id, fields[1], fields[2], fields[3], fields[4], fields[5] or ''})
    end
end
if wrong then return {-1, {}} end
return {#ids / 2, found}
"""

# KEYS sessions
# ARGV first last prefix
# Lists the sessions at these places by their owners, where a router of an earlier version made them. Returns how many.
OWN = """
local ids = redis.call('ZRANGE', KEYS[1], ARGV[1], ARGV[2], 'WITHSCORES')
for i = 1, #ids, 2 do
    local tenant = redis.call('HGET', ARGV[3] .. 'session:' .. ids[i], 'tenant') or ''
    redis.call('ZADD', ARGV[3] .. 'owned:tenant:' .. tenant, 'NX', ids[i + 1], ids[i])
end
return #ids / 2
"""

# KEYS claim claimed
# ARGV generation_id owner ttl_ms keep_ms gone expired_of
# Returns {generation_id, owner, expired} of another holder, or {}.
CLAIM = """
local held, expired = redis.call('HMGET', KEYS[1], 'generation_id', 'owner'), 0
if not held[1] then
    held, expired = redis.call('HMGET', KEYS[2], 'generation_id', 'owner'), 1
end
if held[1] and held[1] ~= ARGV[1] and held[2] ~= ARGV[5] and not (expired == 1 and held[2] == ARGV[6]) then
    return {held[1], held[2], expired}
end
for i, key in ipairs(KEYS) do
    redis.call('HSET', key, 'generation_id', ARGV[1], 'owner', ARGV[2])
    redis.call('PEXPIRE', key, ARGV[2 + i])
end
return {}
"""

# KEYS claim and claimed of each
# ARGV owner ttl_ms keep_ms, then a generation_id for each
# Returns the numbers of the lost claims.
RENEW = """
local lost = {}
for i = 1, #KEYS / 2 do
    local claim, generation_id = KEYS[2 * i - 1], ARGV[i + 3]
    local held = redis.call('HMGET', claim, 'generation_id', 'owner')
    if held[1] and (held[1] ~= generation_id or held[2] ~= ARGV[1]) then
        table.insert(lost, i)
    else
        for j, key in ipairs({claim, KEYS[2 * i]}) do
            redis.call('HSET', key, 'generation_id', generation_id, 'owner', ARGV[1])
            redis.call('PEXPIRE', key, ARGV[1 + j])
        end
    end
end
return lost
"""

# KEYS claim claimed
# ARGV generation_id owner
RELEASE = """
for _, key in ipairs(KEYS) do
    local held = redis.call('HMGET', key, 'generation_id', 'owner')
    if held[1] == ARGV[1] and held[2] == ARGV[2] then redis.call('DEL', key) end
end
return 1
"""
