"""The second half of a layer with an MLP and experts beside it, each with norms of its own (Gemma 4, 26B-A4B).

Legend: T tokens, E hidden size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ryzanstein.worker.architectures.layer_heads import BesideNames
from ryzanstein.worker.architectures.spec import DecoderSpec, MoeSpec
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.layers.experts import Mixture
from ryzanstein.worker.model.layers.norm import new_norm
from ryzanstein.worker.model.layers.source import WeightSource


class ExpertsBeside:
    """Adds the output of experts to that of an MLP, each normed. The experts are chosen by what comes into the half."""

    def __init__(
        self, source: WeightSource, tp: TensorParallel, spec: DecoderSpec, own: tuple[BesideNames, MoeSpec], index: int
    ) -> None:
        prefix, (names, moe) = spec.names.layer.format(layer=index), own
        self._experts = Mixture(source, tp, spec, prefix, moe)
        self._mlp_norm, self._in_norm, self._out_norm = (
            new_norm(source, prefix + name, spec.hidden_size, spec.norm)
            for name in (names.mlp_norm, names.experts_in_norm, names.experts_out_norm)
        )
        self._collectives = tp.collectives

    def __call__(self, x_TE: Tensor, mlp_TE: Tensor) -> Tensor:
        """Returns the sum, the same on every rank. `x_TE` comes into the half; `mlp_TE` is this rank's part of the MLP."""
        experts_TE = self._experts.mixed(self._in_norm(x_TE), self._experts.route(x_TE))
        mlp_TE, experts_TE = self._collectives.all_reduce(torch.stack((mlp_TE, experts_TE)))
        return self._mlp_norm(mlp_TE).add_(self._out_norm(experts_TE))
