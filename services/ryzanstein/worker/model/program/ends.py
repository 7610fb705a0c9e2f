"""The ops before the layers of a step and after them: embedding, angles, logits, the greatest of them.

Legend: R rotated numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ryzanstein.worker.kernels.functions.steps.program import ANGLES, EMBED, GREATEST, HEAD
from ryzanstein.worker.model.program.ops import NotNative, Ops, RowNorm
from ryzanstein.worker.model.program.sizes import MOST_LOGITS, MOST_ROWS
from ryzanstein.worker.products.native import NativeWeight


def emit_rows(ops: Ops, weight: NativeWeight, out: int, *, first: int, num_valid: int) -> None:
    """Adds the rows of a weight, whose first one has the id `first`, for the tokens' ids. Others get zeros."""
    ops.place = "embedding"
    ops.add(EMBED, out=out, first=first, **ops.weight(weight) | {"num_outputs": num_valid})


def emit_angles(ops: Ops, number: int, frequencies_R: Tensor, *, interleaved: bool, magnitude: float) -> None:
    """Adds the angles of the tokens' positions, as those of rotary embedding `number`."""
    ops.place = "embedding"
    ops.rotaries[number] = len(frequencies_R), interleaved
    ops.add(ANGLES, norm=ops.address(frequencies_R), factor=magnitude, rotary=number)


def emit_logits(ops: Ops, weights: Sequence[NativeWeight], source: int, norm: RowNorm, *, factor: float) -> None:
    """Adds the product of the wanted rows of a buffer, after a norm. Raises NotNative."""
    if not weights:
        raise NotNative("the head is a product of another kernel")
    width = sum(weight.shape[0] for weight in weights)
    ops.most_wanted = min(MOST_ROWS, MOST_LOGITS // width)
    if not ops.most_wanted:
        raise NotNative("too many logits")
    ops.layer, ops.place = -1, "head"
    logits = ops.buffer("logits", width, ops.most_wanted)
    ops.logits, first = (logits, width), 0
    for weight in weights:
        ops.multiply(weight, source, logits + first, norm, op=HEAD, stride=width, factor=factor)
        first += weight.shape[0]


def emit_greatest(ops: Ops, num_valid: int) -> None:
    """Adds the choice of the greatest of the first `num_valid` logits of each row."""
    logits, width = ops.logits
    ops.add(GREATEST, in_=logits, stride=width, num_outputs=num_valid)
