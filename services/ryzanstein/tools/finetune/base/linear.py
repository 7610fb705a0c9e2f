"""Linear layers and embeddings over weights as they are served, which stay frozen.

QLoRA (Dettmers et al. 2023) trains an adapter through quantized weights. Here they are those that a node
serves, so that the adapter corrects their very rounding. Both passes make floats of some rows of a weight
at a time: the whole of them is never in memory.

Legend: T rows, I inputs, O outputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_WINDOW_BYTES = 2**24  # of floats that are made at a time


class LookedUp(Protocol):
    """A weight whose rows can be read as floats."""

    def lookup(self, index_T: Tensor) -> Tensor:
        """Returns rows of the weight in float32, [T, I]."""
        ...


class _Product(torch.autograd.Function):
    """Rows times a frozen weight. The gradient of the weight is never asked for."""

    @staticmethod
    def forward(ctx: Any, x_TI: Tensor, weight: BlocksWeight, bias_O: Tensor | None) -> Tensor:
        ctx.weight = weight
        num_outputs = weight.shape[0]
        if num_outputs <= weight.rows_at_once:
            return F.linear(x_TI, weight.floats(), bias_O)
        out_TO = x_TI.new_empty(len(x_TI), num_outputs)
        for first, weight_RI in weight.windows():
            out_TO[:, first : first + len(weight_RI)] = x_TI @ weight_RI.t()
        return out_TO if bias_O is None else out_TO.add_(bias_O)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, None]:
        (gradient_TO,) = gradients
        weight: BlocksWeight = ctx.weight
        if weight.shape[0] <= weight.rows_at_once:
            return gradient_TO @ weight.floats(), None, None
        gradient_TI = gradient_TO.new_zeros(len(gradient_TO), weight.shape[1])
        for first, weight_RI in weight.windows():
            gradient_TI.addmm_(gradient_TO[:, first : first + len(weight_RI)], weight_RI)
        return gradient_TI, None, None


class BlocksWeight:
    """A weight [O, I] as it is served. It is shared by an embedding and the head that is tied to it."""

    def __init__(self, rows: LookedUp, shape: tuple[int, int]) -> None:
        self._rows, self.shape = rows, shape
        self.rows_at_once = max(1, _WINDOW_BYTES // (4 * shape[1]))

    def lookup(self, index_T: Tensor) -> Tensor:
        return self._rows.lookup(index_T)

    def floats(self) -> Tensor:
        """Returns the whole weight in float32."""
        return self._rows.lookup(torch.arange(self.shape[0]))

    def windows(self) -> Iterator[tuple[int, Tensor]]:
        """Yields some rows at a time in float32: the number of the first, and the rows."""
        num_outputs = self.shape[0]
        for first in range(0, num_outputs, self.rows_at_once):
            yield first, self._rows.lookup(torch.arange(first, min(first + self.rows_at_once, num_outputs)))


class BlocksLinear(nn.Linear):
    """A linear layer over a served weight. Its own `weight` has no element: peft finds dtype and device there."""

    def __init__(self, served: BlocksWeight, bias_O: nn.Parameter | None) -> None:
        nn.Module.__init__(self)
        self.out_features, self.in_features = served.shape
        self.served = served
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self.register_parameter("bias", bias_O)

    def forward(self, input: Tensor) -> Tensor:
        rows_TI = input.reshape(-1, self.in_features)
        product_TO: Tensor = _Product.apply(rows_TI, self.served, self.bias)  # type: ignore[no-untyped-call]
        return product_TO.view(*input.shape[:-1], self.out_features)


class BlocksEmbedding(nn.Module):
    """An embedding over a served weight. `inner` is the model's own, which may scale what it looks up."""

    def __init__(self, served: BlocksWeight, inner: nn.Module) -> None:
        super().__init__()
        self.served = served
        self.weight = nn.Parameter(torch.empty(0), requires_grad=False)
        self._inner = (inner,)  # in a tuple: its placeholder of a weight is none of the model's

    def forward(self, input: Tensor) -> Tensor:
        ids, place = torch.unique(input, return_inverse=True)
        (inner,) = self._inner
        looked_up: Tensor = torch.func.functional_call(inner, {"weight": self.served.lookup(ids)}, (place,))
        return looked_up
