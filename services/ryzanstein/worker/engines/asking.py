"""How an agent asks vLLM's plug-in for a choice: the whole request, in one argument of the API.

vLLM passes `vllm_xargs` on to logits processors as they are. A server without the plug-in ignores them,
so a probe asks for tokens that only the plug-in can give: the numbers of its protocol.

The plug-in has no way back but tokens. Where a choice has a constraint, its `escape` token, which ends texts,
is followed by a code: why the answer ends there (see `ConstraintEnd`).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Mapping
from enum import IntEnum

import msgspec

from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.engine.messages import SubmitGroup

PROTOCOL = 2
ARGUMENT = f"ryzanstein_{PROTOCOL}"
"""A plug-in of another protocol ignores the argument."""
PROBE = "ryzanstein"
"""The argument of a probe, which every plug-in answers, whatever its protocol."""
SIGN = (6, 4, 7)
"""Ids that every vocabulary has, and that no model computes in this order twice."""
NUM_PROBED = len(SIGN) + 4
"""A probe is answered with the sign, the protocol, and the version of llguidance; 0 0 0 without one."""
READY, WAIT, UNKNOWN = 6, 4, 7
"""What the plug-in answers a request that `prepares`. UNKNOWN: it has not the table, as after a restart."""


class ConstraintEnd(IntEnum):
    """What follows the escape token of a constrained choice.

    DRAWN: that token was drawn, it is the last of the answer. COMPLETE: nothing may follow what came before it. The others:
    the constraint could not be followed any further.
    """

    DRAWN = 0
    COMPLETE = 1
    TOO_SLOW = 2
    UNSATISFIED = 3
    TOO_COMPLEX = 4
    NONE_ALLOWED = 5
    NOT_COMPILED = 6
    NAMES_THE_END = 7
    NOT_FINITE = 8


class AskedRow(msgspec.Struct, frozen=True):
    """A choice as the plug-in decides it.

    The request's tokens begin with `num_prompt` of the prompt; the others were generated before. Prompt
    and generated tokens are left out of `group`. `table` names the tokens that a constraint is about (`table_name`), and
    `escape` is the one that says that the answer ends. A request that `prepares` wants no answer but whether its constraint
    is compiled; without a `group`, whether the table is known, which it may bring in `tokens`: its second token is then the
    escape token. One that `probes` is answered with what the plug-in is.
    """

    group: SubmitGroup | None = None
    choice: int = 0
    num_prompt: int = 0
    table: bytes = b""
    escape: int = 0
    tokens: bytes = b""
    prepares: bool = False
    probes: bool = False


def table_name(table: bytes) -> bytes:
    """Returns the name of a packed table of tokens."""
    return hashlib.blake2b(table, digest_size=16).digest()


def packed(row: AskedRow) -> dict[str, str]:
    """Returns the value of `vllm_xargs`."""
    return {ARGUMENT: base64.b64encode(msgspec.msgpack.encode(row)).decode("ascii")}


def unpacked(arguments: Mapping[str, object] | None) -> AskedRow | None:
    """Returns what was asked; None: nothing, the request is not ours. Raises ValueError for what no agent sends."""
    if not arguments:
        return None
    if PROBE in arguments:
        return AskedRow(probes=True)
    if (text := arguments.get(ARGUMENT)) is None:
        return None
    if not isinstance(text, str):
        raise ValueError(f"{ARGUMENT} must be a string")
    try:
        row = msgspec.msgpack.decode(base64.b64decode(text, validate=True), type=AskedRow)
        _check(row)
    except (binascii.Error, msgspec.MsgspecError, RyzansteinError, ValueError) as error:
        raise ValueError(f"{ARGUMENT}: {error}") from None
    return row


def _check(row: AskedRow) -> None:
    """Raises ValueError or RyzansteinError for a row that cannot be decided. Whoever reaches vLLM may send one."""
    group = row.group
    if group is None:
        return
    group.sampling.validate()
    if group.sampling.seed is None or group.pooling is not None:
        raise ValueError("the request has no seed, or asks for what this sampler does not do")
    if not 0 <= row.choice < len(group.generated) or row.num_prompt < 1:
        raise ValueError(f"choice {row.choice} of {len(group.generated)} after {row.num_prompt} tokens")


def is_constrained(row: AskedRow) -> bool:
    """Returns whether the choice has a constraint."""
    return row.group is not None and row.group.sampling.constraint is not None


def asked_row(group: SubmitGroup, choice: int, table: bytes = b"", escape: int = 0, *, prepares: bool = False) -> AskedRow:
    """Returns what to ask for a choice of a group. `table` and `escape` are for constraints, see `AskedRow`."""
    nothing: list[list[int]] = [[] for _ in group.generated]
    bare = msgspec.structs.replace(group, prompt_ids=[], generated=nothing)
    return AskedRow(bare, choice, len(group.prompt_ids), table=table, escape=escape, prepares=prepares)
