"""A quantization from its checks to the finished directory."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any, TextIO

from ryzanstein.tools.atomic import put_in_place, refuse_place
from ryzanstein.tools.quantize.automatic import quantize_automatically
from ryzanstein.tools.quantize.job import QuantizeJob
from ryzanstein.tools.quantize.methods.straight import quantize_straight
from ryzanstein.tools.quantize.methods.ternary import is_ternary
from ryzanstein.tools.quantize.partial import PartialModel
from ryzanstein.tools.quantize.reading.origin import Origin
from ryzanstein.tools.quantize.request import Request, Schemes
from ryzanstein.tools.quantize.texts import CalibrationText, read_texts
from ryzanstein.worker.refusal import ModelRefused


def quantize_model(source: Path, target: Path, request: Request, out: TextIO, *, force: bool = False) -> None:
    """Quantizes the model `source` to the directory `target`; progress is written to `out`.

    What is finished when it stops stays beside `target` for the same call to go on, unless the
    model is refused. It stays too if something has appeared at `target` meanwhile. Raises ModelRefused; OSError.
    """
    if source.resolve() == target.resolve():
        raise ModelRefused(f"{target} is SRC")
    refuse_place(target, force=force)
    target = target.resolve()
    if source.resolve().is_relative_to(target):
        raise ModelRefused(f"{target} has SRC in it")
    with Origin.open(source) as origin:
        _quantize(origin, target, request, out, force=force)


def _quantize(origin: Origin, target: Path, request: Request, out: TextIO, *, force: bool) -> None:
    schemes = Schemes(request, request.group_of(origin.num_parameters))
    if request.method == "ternary" and not request.calibration:
        _refuse_unmeasured(origin)
    with PartialModel.open(target, _made_of(origin, schemes)) as partial:
        try:
            origin.describe(partial.model)
            job = QuantizeJob(origin, schemes, partial, _text(origin, partial, request), out)
            (quantize_automatically if request.method == "auto" else quantize_straight)(job)
        except ModelRefused:
            partial.remove()
            raise
        refuse_place(target, force=force)  # somebody may have written there meanwhile: the result waits
        put_in_place(partial.model, target)
        partial.remove()


def _made_of(origin: Origin, schemes: Schemes) -> dict[str, Any]:
    """Returns what a quantization must have in common with an earlier one to go on with it."""
    request = schemes.request
    texts = [[str(file), file.stat().st_size, file.stat().st_mtime_ns] for file in request.calibration]
    return {
        "SRC": f"{origin.path} {origin.digest[:16]}",
        "--method": request.method,
        "--bits": request.bits,
        "--group": schemes.group,
        "--zero-points": request.zero_points,
        "--act-order": request.act_order,
        "--calibration": texts,
        "--tokens": request.num_tokens,
        "--budget": None if request.budget is None else [request.budget.loss, request.budget.num_bytes],
    }


def _text(origin: Origin, partial: PartialModel, request: Request) -> CalibrationText | None:
    if not request.calibration:
        return None
    tokenizer = partial.model / "tokenizer.json"
    return read_texts(tokenizer, request.calibration, request.num_tokens, origin.spec.context_length)


def _refuse_unmeasured(origin: Origin) -> None:
    """Raises ModelRefused unless the matrices of every layer are ternary already."""
    layers = (origin.layer_matrices(index) for index in range(origin.spec.num_layers))
    for name in chain.from_iterable(layers):
        if not is_ternary(origin.floats(name)):
            raise ModelRefused(
                f"tensor {name} is not ternary: whether the model was trained to be is measured, which needs --calibration"
            )
