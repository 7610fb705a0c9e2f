"""One quantization from SRC to DST: layer by layer, each written before the next is read.

Legend: W windows, T tokens of a window, E hidden size.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from safetensors import safe_open
from torch import Tensor

from ryzanstein.tools.quantize.methods.grids import Grid
from ryzanstein.tools.quantize.methods.losses import Loss, measured
from ryzanstein.tools.quantize.methods.one_layer import module_of
from ryzanstein.tools.quantize.partial import PartialModel
from ryzanstein.tools.quantize.reading.layouts import LayoutScheme, quantization_config
from ryzanstein.tools.quantize.reading.origin import Origin
from ryzanstein.tools.quantize.reading.walk import DecoderHead, Walk
from ryzanstein.tools.quantize.request import Schemes
from ryzanstein.tools.quantize.texts import CalibrationText
from ryzanstein.worker.refusal import ModelRefused


@dataclass(frozen=True, slots=True)
class QuantizeJob:
    """What all methods share: the model, the calibration text if there is one, and where results go."""

    origin: Origin
    schemes: Schemes
    partial: PartialModel
    text: CalibrationText | None
    out: TextIO

    def walk(self) -> Walk:
        length = 1 if self.text is None else self.text.length
        return Walk(self.origin.spec, length)

    def say(self, line: str) -> None:
        self.out.write(f"{line}\n")
        self.out.flush()

    def shard(self, index: int) -> Path:
        """The file of layer `index`; the one after the last layer has everything else."""
        count = self.origin.spec.num_layers + 1
        return self.partial.model / f"model-{index + 1:05d}-of-{count:05d}.safetensors"

    @property
    def known_text(self) -> CalibrationText:
        assert self.text is not None, "the command requires one"
        return self.text

    def loss(self, head: DecoderHead, original_WTE: Tensor, quantized_WTE: Tensor) -> Loss:
        return measured(head, self.known_text.held_WT, original_WTE, quantized_WTE)

    def refuse_above(self, loss: Loss) -> None:
        """Raises ModelRefused if the loss may exceed the budget."""
        limit = self.schemes.request.limit
        if limit is not None and not loss.upper <= limit.loss:
            raise ModelRefused(
                f"--budget: {loss}; with two standard errors {loss.upper:.2%}, more than {limit.loss:.2%}: nothing was written"
            )


def finish(job: QuantizeJob, layers: Sequence[Mapping[str, LayoutScheme]], loss: Loss | None) -> None:
    """Writes what belongs to no layer, the index and config.json. Raises ModelRefused if nothing was quantized."""
    schemes = {module: scheme for layer in layers for module, scheme in layer.items()}
    if not schemes:
        raise ModelRefused(f"{job.origin.path}: no matrix of its layers can be quantized")
    job.partial.save(job.shard(len(layers)), dict(_ends(job.origin)))
    files = [job.shard(index) for index in range(len(layers) + 1)]
    weight_map = {name: file.name for file in files for name in _names(file)}
    total = sum(file.stat().st_size for file in files)
    _write_json(
        job.partial.model / "model.safetensors.index.json",
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))},
    )
    names = job.origin.spec.names
    floats = [module_of(name) for name, shape in job.origin.shapes.items() if len(shape) == 2]
    ignored = dict.fromkeys([names.head, *(module for module in floats if module not in schemes)])
    ignored.pop(names.embedding, None)
    config = {**job.origin.config, "quantization_config": quantization_config(schemes, list(ignored))}
    _write_json(job.partial.model / "config.json", config)
    if loss is not None:
        _write_json(job.partial.model / "quantization_report.json", _report(job, schemes, loss))
    job.say(f"{total / 1e6:.1f} MB: {_summary(schemes)}")


def _ends(origin: Origin) -> Iterator[tuple[str, Tensor]]:
    prefix = origin.spec.names.layer.split("{layer}")[0]
    for name in origin.shapes:
        if not name.startswith(prefix):
            yield name, origin.floats(name).to(origin.dtypes[name])


def _names(file: Path) -> list[str]:
    with safe_open(file, framework="pt") as opened:
        return list(opened.keys())


def _summary(schemes: Mapping[str, LayoutScheme]) -> str:
    counts: dict[str, int] = {}
    for scheme in schemes.values():
        counts[str(scheme)] = counts.get(str(scheme), 0) + 1
    return ", ".join(f"{count} matrices in {scheme}" for scheme, count in counts.items())


def _report(job: QuantizeJob, schemes: Mapping[str, LayoutScheme], loss: Loss) -> dict[str, Any]:
    """Returns what was measured, for whoever has the model later."""
    request = job.schemes.request
    return {
        "method": request.method,
        "held_out": {**asdict(loss), "upper": loss.upper},
        "schemes": {module: str(scheme) for module, scheme in schemes.items()},
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def to_state(schemes: Mapping[str, LayoutScheme]) -> dict[str, Any]:
    """Returns schemes as JSON keeps them."""
    return {
        module: [
            each.grid.bits,
            each.grid.group,
            each.grid.zero_points,
            str(each.grid.scale_dtype),
            each.rounds_inputs,
            each.ternary,
        ]
        for module, each in schemes.items()
    }


def from_state(kept: Mapping[str, Any]) -> dict[str, LayoutScheme]:
    return {
        module: LayoutScheme(Grid(bits, group, zero_points, getattr(torch, dtype.removeprefix("torch."))), rounds, ternary)
        for module, (bits, group, zero_points, dtype, rounds, ternary) in kept.items()
    }
