"""Quantizes every layer by one method. Later layers are calibrated on what the quantized earlier ones give.

Legend: W windows, T tokens of a window, E hidden size.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.tools.quantize.job import QuantizeJob, finish, from_state, to_state
from ryzanstein.tools.quantize.methods.one_layer import QuantizedLayer, quantized_layer
from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights
from ryzanstein.tools.quantize.reading.walk import DecoderHead, Walk, carry
from ryzanstein.tools.quantize.request import CALIBRATED


def quantize_straight(job: QuantizeJob) -> None:
    """Writes the model into the partial directory. Raises ModelRefused; OSError."""
    walk, num_layers = job.walk(), job.origin.spec.num_layers
    layers = [from_state(kept) for kept in job.partial["layers"] or []]
    if layers:
        job.say(f"{len(layers)} of {num_layers} layers are done already")
    states = _states(job, walk, len(layers))
    for index in range(len(layers), num_layers):
        result = _layer(job, walk, index, states)
        job.partial.save(job.shard(index), result.tensors)
        if states:
            job.partial.save(_states_file(job, index + 1), states)
        layers.append(result.schemes)
        job.partial["layers"] = [to_state(schemes) for schemes in layers]
        _states_file(job, index).unlink(missing_ok=True)
        for note in result.notes:
            job.say(note)
        job.say(f"layer {index + 1} of {num_layers}: {len(result.schemes)} matrices")
    loss = None
    if job.text is not None:
        loss = job.loss(DecoderHead.read(job.origin.files, job.origin.spec), states["original"], states["quantized"])
        job.say(str(loss))
        job.refuse_above(loss)
    finish(job, layers, loss)


def _states_file(job: QuantizeJob, index: int) -> Path:
    return job.partial.path / f"hidden-{index}.safetensors"


def _states(job: QuantizeJob, walk: Walk, index: int) -> dict[str, Tensor]:
    """Returns the hidden states before layer `index`, none without a text."""
    if job.text is None:
        return {}
    if index:
        return job.partial.load(_states_file(job, index))
    held_WTE = torch.stack(list(walk.embedded(job.origin.files, job.text.held_WT)))
    states = {"original": held_WTE, "quantized": held_WTE.clone()}
    if job.schemes.request.method in CALIBRATED:
        states["fit"] = torch.stack(list(walk.embedded(job.origin.files, job.text.fit_WT)))
    return states


def _layer(job: QuantizeJob, walk: Walk, index: int, states: dict[str, Tensor]) -> QuantizedLayer:
    """Quantizes a layer, and carries the hidden states through it."""
    weights = LayerWeights(job.origin.files)
    layer = walk.layer(weights, index)
    if "original" in states:
        carry(layer, states["original"])
    if "fit" in states:
        weights.watch()
        for state_TE in states["fit"]:
            layer(state_TE)
        weights.watch_no_more()
    result = quantized_layer(weights, job.origin.dtypes, job.schemes, job.origin.spec, index)
    is_last = index == job.origin.spec.num_layers - 1
    for name in ("quantized",) if is_last else ("quantized", "fit"):
        if name in states:
            carry(layer, states[name])
    return result
