"""Quantizes the matrices of one layer that has seen the calibration text, or none.

Legend: O outputs, I inputs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ryzanstein.tools.quantize.methods.awq import fold_scales
from ryzanstein.tools.quantize.methods.gptq import gptq
from ryzanstein.tools.quantize.methods.grids import GridMatrix, fitted
from ryzanstein.tools.quantize.methods.ternary import ternary
from ryzanstein.tools.quantize.reading.layer_tensors import LayerTensors
from ryzanstein.tools.quantize.reading.layer_weights import LayerWeights, Site
from ryzanstein.tools.quantize.reading.layouts import LayoutScheme, stored
from ryzanstein.tools.quantize.request import CALIBRATED, Schemes
from ryzanstein.worker.architectures.spec import DecoderSpec
from ryzanstein.worker.refusal import CheckpointError

MIN_ROWS = 128
"""The inputs that an expert must have seen; statistics of fewer would fit noise."""


@dataclass(slots=True)
class QuantizedLayer:
    """What became of a layer: the tensors to write, the schemes by module, and what stays in floats and why."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    schemes: dict[str, LayoutScheme] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def module_of(name: str) -> str:
    return name.removesuffix(".weight")


def quantized_layer(
    weights: LayerWeights, dtypes: Mapping[str, torch.dtype], schemes: Schemes, spec: DecoderSpec, index: int
) -> QuantizedLayer:
    """Quantizes a layer, and leaves in `weights` the floats that the result stands for. Raises CheckpointError."""
    tensors, result = LayerTensors(weights, dtypes), QuantizedLayer()
    chosen = dict(_chosen(weights, dtypes, schemes, result.notes))
    if schemes.request.method == "awq":
        sites = [site for site in weights.sites if any(name in chosen for name in site.matrices)]
        fold_scales(tensors, sites, spec, index, lambda num_inputs: schemes.grid(num_inputs, torch.float32))
    for name, tensor in tensors.replaced.items():
        weights.put(name, tensor)
    for name in weights.shapes:
        if name not in chosen:
            result.tensors[name] = tensors.written(name)
            continue
        site, scheme = chosen[name]
        matrix = quantized_matrix(name, tensors[name], site, scheme, schemes)
        site.put(name, matrix.floats())
        site.rounds_inputs = scheme.rounds_inputs
        result.tensors.update(stored(module_of(name), matrix, scheme))
        result.schemes[module_of(name)] = scheme
    return result


def _chosen(
    weights: LayerWeights, dtypes: Mapping[str, torch.dtype], schemes: Schemes, notes: list[str]
) -> Iterator[tuple[str, tuple[Site, LayoutScheme]]]:
    """Yields the matrices that are quantized, each with its site and scheme. A site is quantized whole or not."""
    for site in weights.sites:
        found = {name: schemes.scheme(*shape, dtypes[name]) for name, shape in site.matrices.items()}
        reason = why_floats(site, schemes)
        if reason is None and None in found.values():
            reason = f"its shape {list(next(iter(site.matrices.values())))} suits no group"
        for name, scheme in found.items():
            if reason is None and scheme is not None:
                yield name, (site, scheme)
            else:
                notes.append(f"{module_of(name)} stays in floats: {reason}")


def why_floats(site: Site, schemes: Schemes) -> str | None:
    """Returns why the matrices of a site cannot be calibrated, None if they can."""
    if schemes.request.method not in CALIBRATED:
        return None
    num_rows = 0 if site.watched is None else site.watched.num_rows
    return None if num_rows >= MIN_ROWS else f"the calibration text gave it {num_rows} rows, {MIN_ROWS} are needed"


def quantized_matrix(name: str, weight_OI: Tensor, site: Site, scheme: LayoutScheme, schemes: Schemes) -> GridMatrix:
    """Returns a matrix by the request's method. `auto` means GPTQ here. Raises CheckpointError."""
    if scheme.ternary:
        return ternary(weight_OI)
    if site.watched is None:
        return fitted(weight_OI, scheme.grid)
    hessian_II = site.watched.hessian_II
    if not hessian_II.isfinite().all():
        raise CheckpointError(f"the inputs of {name} have a NaN or an infinity on the calibration text")
    if schemes.request.method == "awq":
        return fitted(weight_OI, scheme.grid, hessian_II.diagonal())
    try:
        return gptq(weight_OI, hessian_II, scheme.grid, act_order=schemes.request.act_order)
    except ArithmeticError as error:
        raise CheckpointError(f"{name}: {error}") from error
