"""How an agent asks vLLM's plug-in for a choice: the whole request, in one argument of the API.

vLLM passes `vllm_xargs` on to logits processors as they are. A server without the plug-in ignores them,
so a probe asks for tokens that only the plug-in can give.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping

import msgspec

from ryzanstein.errors import RyzansteinError
from ryzanstein.worker.engine.messages import SubmitGroup

PROTOCOL = 1
ARGUMENT = f"ryzanstein_{PROTOCOL}"
"""A plug-in of another protocol ignores the argument, and is not found."""


class AskedRow(msgspec.Struct, frozen=True):
    """A choice as the plug-in decides it.

    The request's tokens begin with `num_prompt` of the prompt; the others were generated before. Prompt
    and generated tokens are left out of `group`. `forced` tokens are what a probe wants, whatever the
    model computes.
    """

    group: SubmitGroup | None = None
    choice: int = 0
    num_prompt: int = 0
    forced: list[int] = []


def packed(row: AskedRow) -> dict[str, str]:
    """Returns the value of `vllm_xargs`."""
    return {ARGUMENT: base64.b64encode(msgspec.msgpack.encode(row)).decode("ascii")}


def unpacked(arguments: Mapping[str, object] | None) -> AskedRow | None:
    """Returns what was asked; None: nothing, the request is not ours. Raises ValueError for what no agent sends."""
    if not arguments or (text := arguments.get(ARGUMENT)) is None:
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
    if group.sampling.seed is None or group.sampling.constraint is not None or group.pooling is not None:
        raise ValueError("the request has no seed, or asks for what this sampler does not do")
    if not 0 <= row.choice < len(group.generated) or row.num_prompt < 1:
        raise ValueError(f"choice {row.choice} of {len(group.generated)} after {row.num_prompt} tokens")


def asked_row(group: SubmitGroup, choice: int) -> AskedRow:
    """Returns what to ask for a choice of a group."""
    nothing: list[list[int]] = [[] for _ in group.generated]
    return AskedRow(msgspec.structs.replace(group, prompt_ids=[], generated=nothing), choice, len(group.prompt_ids))
