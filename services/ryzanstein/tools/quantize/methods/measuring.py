"""Quantizes every layer to few bits and measures what each product adds to the layer's error.

Every layer sees what the original model gives, so nothing depends on a choice that is made later.

Legend: W windows, T tokens of a window, E hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ryzanstein.tools.quantize.job import QuantizeJob
from ryzanstein.tools.quantize.methods.grids import GridMatrix
from ryzanstein.tools.quantize.methods.one_layer import module_of, quantized_matrix, why_floats
from ryzanstein.tools.quantize.reading.layer_tensors import LayerTensors
from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights, Site
from ryzanstein.tools.quantize.reading.layouts import stored
from ryzanstein.tools.quantize.reading.units import Unit, candidates_file, eight_bits, scheme_of
from ryzanstein.tools.quantize.reading.walk import Walk, carry
from ryzanstein.tools.quantize.upgrades import LOW


def measured_layers(job: QuantizeJob, walk: Walk) -> tuple[Tensor, list[Unit]]:
    """Returns the original model's last hidden states on the held-out text [W, T, E], and the units of all layers."""
    num_layers = job.origin.spec.num_layers
    kept: list[list[dict[str, object]]] = list(job.partial["units"] or [])
    if kept:
        job.say(f"{len(kept)} of {num_layers} layers are measured already")
    states = job.partial.load(_states_file(job, len(kept))) if kept else _first_states(job, walk)
    for index in range(len(kept), num_layers):
        units = _measured_layer(job, walk, index, states)
        job.partial.save(_states_file(job, index + 1), states)
        kept.append([unit.to_state() for unit in units])
        job.partial["units"] = kept
        _states_file(job, index).unlink(missing_ok=True)
        noises = ", ".join("/".join(f"{noise:.1e}" for noise in unit.noises) for unit in units)
        job.say(f"layer {index + 1} of {num_layers}: noise with {job.schemes.request.bits} and 8 bits {noises}")
    return states["held"], [Unit.from_state(unit) for layer in kept for unit in layer]


def _states_file(job: QuantizeJob, index: int) -> Path:
    return job.partial.path / f"hidden-{index}.safetensors"


def _first_states(job: QuantizeJob, walk: Walk) -> dict[str, Tensor]:
    texts = {"fit": job.known_text.fit_WT, "held": job.known_text.held_WT}
    return {name: torch.stack(list(walk.embedded(job.origin.files, ids_WT))) for name, ids_WT in texts.items()}


def _measured_layer(job: QuantizeJob, walk: Walk, index: int, states: dict[str, Tensor]) -> list[Unit]:
    weights = LayerWeights(job.origin.files)
    layer = walk.layer(weights, index)
    carry(layer, states["held"])
    before_TE = states["fit"][0].clone()
    weights.watch()
    carry(layer, states["fit"])
    weights.watch_no_more()
    tensors, units = LayerTensors(weights, job.origin.dtypes), list[Unit]()
    candidates: dict[str, Tensor] = {}

    def noise(site: Site, matrices: Mapping[str, GridMatrix]) -> float:
        """Returns the mean over tokens of the squared error of the layer's output, relative to the output."""
        for name, matrix in matrices.items():
            site.put(name, matrix.floats())
        after_TE = states["fit"][0]
        error_T = (layer(before_TE) - after_TE).square().sum(dim=1)
        for name in matrices:
            site.put(name, tensors[name])
        return (error_T / after_TE.square().sum(dim=1).clamp_min(torch.finfo(torch.float32).tiny)).mean().item()

    for site in weights.sites:
        reason = _why_floats(job, site)
        if reason is not None:
            for name in site.matrices:
                job.say(f"{module_of(name)} stays in floats: {reason}")
            continue
        schemes = {name: scheme_of(job, name, shape[1], LOW) for name, shape in site.matrices.items()}
        low = {name: quantized_matrix(name, tensors[name], site, schemes[name], job.schemes) for name in schemes}
        for name, matrix in low.items():
            candidates.update(stored(module_of(name), matrix, schemes[name]))
        eight = {name: eight_bits(job, name, tensors[name]) for name in low}
        units.append(Unit(index, site.matrices, (noise(site, low), noise(site, eight))))
    job.partial.save(candidates_file(job, index), candidates)
    return units


def _why_floats(job: QuantizeJob, site: Site) -> str | None:
    for name, shape in site.matrices.items():
        if job.schemes.grid(shape[1], job.origin.dtypes[name]) is None:
            return f"no group of at least 16 divides its {shape[1]} inputs"
    return why_floats(site, job.schemes)
