"""Chooses a format for each product by measured error: few bits by GPTQ, 8 bits, or floats.

First every layer is quantized to few bits, and the noise that each product adds is measured. Then the
held-out text decides how many products get more bits.

Legend: W windows, T tokens of a window, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from ryzanstein.tools.quantize.job import QuantizeJob, finish, from_state, to_state
from ryzanstein.tools.quantize.methods.losses import Loss
from ryzanstein.tools.quantize.methods.measuring import measured_layers
from ryzanstein.tools.quantize.methods.one_layer import module_of
from ryzanstein.tools.quantize.reading.layer_tensors import LayerTensors
from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights
from ryzanstein.tools.quantize.reading.layouts import LayoutScheme, stored
from ryzanstein.tools.quantize.reading.units import Unit, quantized_matrices
from ryzanstein.tools.quantize.reading.walk import DecoderHead, Walk, carry
from ryzanstein.tools.quantize.request import Budget
from ryzanstein.tools.quantize.upgrades import EIGHT, LOW, Upgrades
from ryzanstein.worker.refusal import ModelRefused


def quantize_automatically(job: QuantizeJob) -> None:
    """Writes the model into the partial directory. Raises ModelRefused; OSError."""
    limit, walk = job.schemes.request.limit, job.walk()
    assert limit is not None, "auto has a budget"
    original_WTE, units = measured_layers(job, walk)
    upgrades = Upgrades.of([unit.product(job) for unit in units])
    trials = _Trials(job, walk, DecoderHead.read(job.origin.files, job.origin.spec), units, original_WTE)
    formats = upgrades.formats(_num_steps(job, upgrades, trials, limit))
    loss = trials.loss(formats)
    job.refuse_above(loss)
    finish(job, _written_layers(job, walk, units, formats), loss)


@dataclass(frozen=True, slots=True)
class _Trials:
    """Measures choices on the held-out text."""

    job: QuantizeJob
    walk: Walk
    head: DecoderHead
    units: Sequence[Unit]
    original_WTE: Tensor

    def loss(self, formats: Sequence[int]) -> Loss:
        """Measures, or remembers, also after an interruption."""
        job, key = self.job, "".join(map(str, formats))
        known = dict(job.partial["losses"] or {})
        if key not in known:
            loss = job.loss(self.head, self.original_WTE, self._through(formats))
            known[key] = asdict(loss)
            job.partial["losses"] = known
            num_low, num_eight = formats.count(LOW), formats.count(EIGHT)
            products = f"products: {num_low} in {job.schemes.request.bits} bits, {num_eight} in 8"
            job.say(f"{products}, {len(formats) - num_low - num_eight} in floats: {loss}")
        return Loss(**known[key])

    def _through(self, formats: Sequence[int]) -> Tensor:
        """Returns the last hidden states of the model with these formats."""
        states_WTE = torch.stack(list(self.walk.embedded(self.job.origin.files, self.job.known_text.held_WT)))
        for index in range(self.job.origin.spec.num_layers):
            weights = LayerWeights(self.job.origin.files)
            layer = self.walk.layer(weights, index)
            for name, (matrix, _) in quantized_matrices(self.job, index, self.units, formats).items():
                weights.put(name, matrix.floats())
            carry(layer, states_WTE)
        return states_WTE


def _num_steps(job: QuantizeJob, upgrades: Upgrades, trials: _Trials, limit: Budget) -> int:
    """Returns how many products get more bits. Raises ModelRefused if no choice keeps the budget."""
    if limit.num_bytes is not None:
        others = job.origin.num_bytes - upgrades.num_bytes(len(upgrades.steps))
        count = upgrades.most_within(limit.num_bytes - others)
        if count is None:
            least = others + upgrades.num_bytes(0)
            raise ModelRefused(f"--budget: {limit.num_bytes} bytes; the weights have {least} with the fewest bits")
        return count

    def bounds(count: int) -> tuple[float, float]:
        loss = trials.loss(upgrades.formats(count))
        return loss.relative, loss.upper

    count = upgrades.fewest_within(limit.loss, bounds)
    if count is None:
        raise ModelRefused(f"--budget: nothing can be quantized with a loss of at most {limit.loss:.2%} on the held-out text")
    return count


def _written_layers(
    job: QuantizeJob, walk: Walk, units: Sequence[Unit], formats: Sequence[int]
) -> list[Mapping[str, LayoutScheme]]:
    """Writes the layers, those that are not written yet. Returns the schemes of each."""
    layers = [from_state(kept) for kept in job.partial["layers"] or []]
    for index in range(len(layers), job.origin.spec.num_layers):
        matrices = quantized_matrices(job, index, units, formats)
        weights = LayerWeights(job.origin.files)
        walk.layer(weights, index)
        tensors = LayerTensors(weights, job.origin.dtypes)
        written = {name: tensors.written(name) for name in weights.shapes if name not in matrices}
        for name, (matrix, scheme) in matrices.items():
            written.update(stored(module_of(name), matrix, scheme))
        job.partial.save(job.shard(index), written)
        layers.append({module_of(name): scheme for name, (_, scheme) in matrices.items()})
        job.partial["layers"] = [to_state(schemes) for schemes in layers]
    return list(layers)
