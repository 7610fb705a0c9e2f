"""The ops before the layers of a step and after them: embedding, angles, logits, the greatest of them.

Legend: R rotated numbers of a head.
"""

from __future__ import annotations

from torch import Tensor

from ryzanstein.worker.kernels.functions.steps.program import ADAPT_EMBED, ADAPT_HEAD, ANGLES, EMBED, GREATEST, HEAD
from ryzanstein.worker.model.program.ops import NotNative, Ops, RowNorm
from ryzanstein.worker.model.program.sizes import MOST_LOGITS, MOST_ROWS
from ryzanstein.worker.products.native import NativeStack, NativeWeight


def emit_rows(ops: Ops, weight: NativeWeight, out: int, *, first: int, num_valid: int) -> None:
    """Adds the rows of a weight, whose first one has the id `first`, for the tokens' ids. Others get zeros."""
    ops.place = "embedding"
    ops.add(EMBED, out=out, first=first, **ops.weight(weight) | {"num_outputs": num_valid})


def emit_adapted_rows(ops: Ops, site: int, out: int, *, width: int, ids: tuple[int, int]) -> None:
    """Adds what adapters add to the rows of the tokens' ids. `ids`: the first one of this rank, and how many it has."""
    ops.add(ADAPT_EMBED, out=out, weight=site, stride=width, first=ids[0], num_outputs=ids[1])


def emit_angles(ops: Ops, number: int, frequencies_R: Tensor, *, interleaved: bool, magnitude: float) -> None:
    """Adds the angles of the tokens' positions, as those of rotary embedding `number`."""
    ops.place = "embedding"
    ops.rotaries[number] = len(frequencies_R), interleaved
    ops.add(ANGLES, norm=ops.address(frequencies_R), factor=magnitude, rotary=number)


def emit_logits(ops: Ops, stack: NativeStack, source: int, norm: RowNorm, *, factor: float) -> None:
    """Adds the product of the wanted rows of a buffer, after a norm. Raises NotNative."""
    if not stack.weights:
        raise NotNative("the head is a product of another kernel")
    width = stack.width
    ops.most_wanted = min(MOST_ROWS, MOST_LOGITS // width)
    if not ops.most_wanted:
        raise NotNative("too many logits")
    ops.layer, ops.place = -1, "head"
    logits = ops.buffer("logits", width, ops.most_wanted)
    ops.logits = (logits, width)
    if ops.adapting:
        _multiply_adapted(ops, stack, source, norm, factor)
        return
    first = 0
    for weight in stack.weights:
        ops.multiply(weight, source, logits + first, norm, op=HEAD, stride=width, factor=factor)
        first += weight.shape[0]


def _multiply_adapted(ops: Ops, stack: NativeStack, source: int, norm: RowNorm, factor: float) -> None:
    """Adds the product of the wanted rows and what adapters add to it. Raises NotNative."""
    if factor != 1:
        raise NotNative("a factor of logits that adapters add to")
    (logits, width), num_inputs, first = ops.logits, stack.weights[0].shape[1], 0
    normed = ops.normed(num_inputs, source, norm)
    for weight in stack.weights:
        ops.multiply(weight, normed, logits + first, None, op=HEAD, stride=width)
        first += weight.shape[0]
    ops.add(ADAPT_HEAD, in_=normed, out=logits, weight=stack.site, num_inputs=num_inputs, stride=width)


def emit_greatest(ops: Ops, num_valid: int) -> None:
    """Adds the choice of the greatest of the first `num_valid` logits of each row."""
    logits, width = ops.logits
    ops.add(GREATEST, in_=logits, stride=width, num_outputs=num_valid)
