"""What the scripts of the lease and the store do in Redis, in Python, by their text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ryzanstein.orchestrator.leading.providers import redis_lease
from ryzanstein.orchestrator.state import redis_store

Data = dict[str, Any]
"""What the server holds: text, or a hash of text, by key."""


def _replace_lease(data: Data, keys: Sequence[str], args: Sequence[str]) -> int:
    seen, version, holder, address, epoch = args
    held = data.get(keys[0], {}).get("version", "")
    if held != version:
        if held != seen:
            return 0
        data[keys[0]] = {"version": version, "holder": holder, "address": address, "epoch": epoch}
    return 1


def _next_epoch(data: Data, keys: Sequence[str], args: Sequence[str]) -> str:
    data[keys[0]] = str(max(int(data.get(keys[0], "0")), int(args[0])) + 1)
    return str(data[keys[0]])


def _fenced(data: Data, key: str, epoch: int) -> int:
    held = int(data.get(key, "0"))
    if held > epoch:
        return held
    if held < epoch:
        data[key] = str(epoch)
    return 0


def _change(data: Data, keys: Sequence[str], args: Sequence[str]) -> int:
    if held := _fenced(data, keys[0], int(args[0])):
        return held
    epoch, _, number = data.get(keys[1], "0 0").partition(" ")
    if epoch == args[0] and int(number) > int(args[1]):
        return -1
    data[keys[1]] = f"{args[0]} {args[1]}"
    rest = iter(args[2:])
    for key in keys[2:]:
        rows = dict(data.get(key, {}))
        for _ in range(int(next(rest))):
            rows.pop(next(rest), None)
        for _ in range(int(next(rest))):
            name = next(rest)
            rows[name] = next(rest)
        _put(data, key, rows)
    return 0


def _act(data: Data, keys: Sequence[str], args: Sequence[str]) -> int:
    if held := _fenced(data, keys[0], int(args[0])):
        return held
    _, by_id, acts, outcomes, ids, last = keys
    _, act_id, act, outcome, most = args
    number = data.get(by_id, {}).get(act_id)
    if number is None:
        number = data[last] = str(int(data.get(last, "0")) + 1)
        for key, name, value in ((by_id, act_id, number), (acts, number, act), (ids, number, act_id)):
            data[key] = {**data.get(key, {}), name: value}
        old = str(int(number) - int(most))
        if (name := data[ids].get(old)) is not None:
            _put(data, by_id, {key: value for key, value in data[by_id].items() if key != name})
            for part in (acts, outcomes, ids):
                _put(data, part, {key: value for key, value in data.get(part, {}).items() if key != old})
    data[outcomes] = {**data.get(outcomes, {}), number: outcome}
    return 0


def _put(data: Data, key: str, rows: dict[str, str]) -> None:
    """Sets a hash; Redis has no empty ones."""
    if rows:
        data[key] = rows
    else:
        data.pop(key, None)


SCRIPTS: Mapping[str, Callable[..., Any]] = {
    redis_lease._REPLACE: _replace_lease,
    redis_store._NEXT_EPOCH: _next_epoch,
    redis_store._CHANGE: _change,
    redis_store._ACT: _act,
}
"""What each script does with the server's data, its `keys` and `args`."""
