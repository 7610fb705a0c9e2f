"""The command `ryzanstein bench predict`: time of a step by number of ranks.

It uses measured or published figures. Of the model it needs only config.json, so it also works for
a model that fits no available machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from ryzanstein import errors
from ryzanstein.lab.bench.engine.engine import integers
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.lab.bench.engine.scaling.hardware import ScalingDocument, measured, published, read_document
from ryzanstein.lab.bench.engine.scaling.model import Hardware, Prediction, predict
from ryzanstein.lab.bench.engine.scaling.work import DenseModel, Step
from ryzanstein.worker.architectures.registry import read_spec
from ryzanstein.worker.refusal import ModelRefused

_CPU_WEIGHT_BYTES = {"none": 4.0, "fp16": 2.0, "int8": 1.0}
_CPU_ACTIVATION_BYTES = 4
_GPU_BYTES = 2  # bfloat16


def choose_steps(batch: str, context: int, prefill_tokens: int) -> list[Step]:
    """Returns the steps to predict. Raises INVALID_ARGUMENT for a batch below 1."""
    sizes = integers("batch", batch) if batch else ()
    if sizes and min(sizes) < 1:
        raise errors.invalid("batch", "must be at least 1", min(sizes))
    prefill = [Step.prefill(prefill_tokens)] if prefill_tokens else []
    return [Step.decode(size, context) for size in sizes] + prefill


def predictions(hardware: Hardware, model: DenseModel, step: Step, ranks: Sequence[int]) -> list[Prediction]:
    """Predicts a step for each number of ranks.

    Raises INVALID_ARGUMENT for ranks that the model does not divide over or the hardware has no
    figures for.
    """
    try:
        return [predict(hardware, step.name, model.work(step, n), n) for n in ranks]
    except ModelRefused as refusal:
        raise errors.invalid("ranks", str(refusal)) from refusal


def row_of(prediction: Prediction, alone: Prediction, seen: ScalingDocument | None) -> dict[str, Any]:
    """Returns a row of the document: times and speed-up over one rank.

    If both were measured, it has a prediction from one rank's efficiency too.
    """
    row = asdict(prediction) | {"step_s": prediction.step_s, "communication_share": prediction.communication_share}
    row["speed_up"] = alone.step_s / prediction.step_s
    measured_s = seen.step_s(prediction.load, prediction.ranks) if seen else None
    alone_s = seen.step_s(prediction.load, 1) if seen else None
    if measured_s is None or alone_s is None:
        return row
    efficiency = alone.efficiency(alone_s)
    fitted_s = prediction.fitted_s(efficiency)
    return row | {"efficiency": efficiency, "fitted_s": fitted_s, "measured_s": measured_s, "error": fitted_s / measured_s - 1}


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the table for people.

    `work` is the slower of memory and arithmetic, `alone` what is not shared. `fitted` has one
    rank's efficiency, `error` is its error against `seen`, which was measured.
    """
    visible = Table(title="ms of a step, predicted", title_justify="left", box=None)
    for heading in ("load", "n", "work", "alone", "sent", "step", "gain", "fitted", "seen", "error"):
        visible.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        work_s, sent_s = max(row["memory_s"], row["arithmetic_s"]), row["all_reduce_s"] + row["gather_s"]
        sent = f"{_ms(sent_s)} ({row['communication_share']:.1%})"
        seen = (_ms(row["fitted_s"]), _ms(row["measured_s"]), f"{row['error']:+.0%}") if "measured_s" in row else ("", "", "")
        times = (_ms(work_s), _ms(row["unsplit_s"]), sent, _ms(row["step_s"]))
        visible.add_row(row["load"], str(row["ranks"]), *times, f"{row['speed_up']:.2f}", *seen)
    return visible


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f}"


def predict_steps(
    *,
    model: Annotated[Path, typer.Option(help="directory with a config.json", exists=True, file_okay=False)],
    hardware: Annotated[str, typer.Option(help=f"published figures: {', '.join(published())}")] = "",
    machine: Annotated[Path | None, typer.Option(help="JSON of `bench machine`, instead of published figures")] = None,
    collectives: Annotated[Path | None, typer.Option(help="JSON of `bench collectives`")] = None,
    scaling: Annotated[Path | None, typer.Option(help="JSON of `bench scaling --unsplit`, also compared with")] = None,
    ranks: Annotated[str, typer.Option(help="numbers of ranks, comma-separated")] = "1,2",
    batch: Annotated[str, typer.Option(help="batch sizes of decode steps, comma-separated; empty: none")] = "1,8",
    context: Annotated[int, typer.Option(min=1, max=10**8, help="context length of each decoding sequence")] = 1024,
    prefill_tokens: Annotated[int, typer.Option(min=0, max=10**8, help="prompt of the prefill; 0: no prefill")] = 0,
    json_path: Annotated[str, typer.Option("--json", help="write JSON to this file; - is standard output")] = "",
) -> None:
    """Predict the time of a step by number of ranks: memory or arithmetic, unsplit work and messages."""
    with refusals_as_exit():
        seen = None if scaling is None else read_document("scaling", scaling, ScalingDocument)
        chosen = _choose_hardware(hardware, machine, collectives, seen)
        shape = _dense_model(model, seen)
        counts = integers("ranks", ranks)
        rows = [
            row_of(one, alone, seen)
            for step in choose_steps(batch, context, prefill_tokens)
            for alone in predictions(chosen, shape, step, [1])
            for one in predictions(chosen, shape, step, counts)
        ]
        publish({"model": str(model), "hardware": chosen.name, "results": rows}, [table(rows)], json_path)


def _choose_hardware(name: str, machine: Path | None, collectives: Path | None, scaling: ScalingDocument | None) -> Hardware:
    if name:
        known = published()
        if name not in known:
            raise errors.invalid("hardware", f"must be one of {', '.join(known)}", name)
        return known[name]
    if machine is None or collectives is None or scaling is None:
        raise errors.invalid("hardware", "must be given, or all of machine, collectives and scaling")
    return measured(machine, collectives, scaling)


def _dense_model(model: Path, scaling: ScalingDocument | None) -> DenseModel:
    try:
        spec = read_spec(model)
    except ModelRefused as refusal:
        raise errors.invalid("model", str(refusal)) from refusal
    if scaling is None:
        return DenseModel(spec, _GPU_BYTES, _GPU_BYTES)
    if scaling.quantization not in _CPU_WEIGHT_BYTES:
        raise errors.invalid("scaling", f"quantization must be one of {', '.join(_CPU_WEIGHT_BYTES)}", scaling.quantization)
    return DenseModel(spec, _CPU_WEIGHT_BYTES[scaling.quantization], _CPU_ACTIVATION_BYTES)
