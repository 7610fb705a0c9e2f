"""A training from its checks to the finished directory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from safetensors import SafetensorError

from ryzanstein.tools.atomic import put_in_place, refuse_place
from ryzanstein.tools.finetune.base.adapter import targets_of, with_adapter
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.data.batches import planned
from ryzanstein.tools.finetune.data.chats import Encoder
from ryzanstein.tools.finetune.data.examples import ReadFile, examples_of, read_examples
from ryzanstein.tools.finetune.refusal import Diverged
from ryzanstein.tools.finetune.request import FinetuneRequest
from ryzanstein.tools.finetune.training.packing import refuse_unpackable
from ryzanstein.tools.finetune.training.precision import computing
from ryzanstein.tools.finetune.training.preflight import measured
from ryzanstein.tools.finetune.training.session import TrainingOutcome, TrainingSession
from ryzanstein.tools.finetune.training.trainer import SaveFailed, TrainingMaterial
from ryzanstein.tools.finetune.written.adapter import write_adapter, write_json
from ryzanstein.tools.finetune.written.card import card
from ryzanstein.tools.finetune.written.chart import chart
from ryzanstein.tools.finetune.written.lora_gguf import architecture_of, pairs_of, places_of, write_gguf
from ryzanstein.tools.finetune.written.report import KnownRun, TrainingData, made_of, report_of
from ryzanstein.tools.progress import ReadingProgress
from ryzanstein.tools.quantize.partial import TRAINING, PartialModel
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.text.tokenizer import TextModel


def finetune(request: FinetuneRequest, out: TextIO, stopped: Callable[[], bool] = lambda: False) -> None:
    """Trains an adapter and writes it to `request.out`; progress is written to `out`.

    What is finished when it stops stays beside it for the same call to go on. Raises ModelRefused,
    RyzansteinError of the model's text side, Stopped; OSError.
    """
    refuse_place(request.out, force=request.force)
    if not os.access(request.out.resolve().parent, os.W_OK):
        raise ModelRefused(f"{request.out.resolve().parent}: cannot be written")
    with computing(request.schedule.compute):
        _finetune(request, out, stopped)


def _finetune(request: FinetuneRequest, out: TextIO, stopped: Callable[[], bool]) -> None:
    target = request.out.resolve()
    if request.base.resolve().is_relative_to(target):
        raise ModelRefused(f"{target} has BASE in it")
    with Base.open(request.base) as base:
        text = TextModel.load(request.base, template_file=request.chat_template)
        if text.embedding is not None:
            raise ModelRefused(f"{request.base}: makes vectors and no text, which is not trained")
        data = _read(request, text, out)
        model = build(base, int8=request.int8)
        places = places_of(base) if request.gguf else ()
        targets = targets_of(model, base.spec, request.lora.targets)
        model = with_adapter(model, targets, request.lora, request.schedule.seed)
    schedule = request.schedule
    pack_to = schedule.max_length if schedule.packing else None
    plan = planned(data.examples.training, schedule.batch, schedule.epochs, schedule.seed, pack_to)
    material = TrainingMaterial(data.examples.training, data.examples.validation, plan)
    if schedule.checkpointing:
        model.get_base_model().activation_checkpointing_enable({"use_reentrant": False})
    if schedule.packing:
        refuse_unpackable(model, base.spec, material)
    estimate = measured(model, material, schedule.accumulate)
    _say(out, str(estimate))
    if estimate.peak_bytes > estimate.available_bytes:
        raise ModelRefused(f"memory is short: {estimate}: --checkpointing, a smaller --batch or --max-length need less")
    if request.estimate:
        return
    with PartialModel.open(target, made_of(request, base, data), TRAINING) as partial:
        outcome = _outcome(TrainingSession(model, material, schedule, request.watching, partial.path, out, stopped), partial)
        report = report_of(KnownRun(request, base, data, targets), outcome)
        try:
            _write(model, report, outcome, partial.model)
            if request.gguf:
                file = partial.model / f"{target.name}.gguf"
                write_gguf(file, architecture_of(base), places, pairs_of(model), target.name)
        except (OSError, SafetensorError) as error:
            raise SaveFailed(partial.model, error) from error
        refuse_place(target, force=request.force)
        put_in_place(partial.model, target)
        partial.remove()


def _read(request: FinetuneRequest, text: TextModel, out: TextIO) -> TrainingData:
    """Reads training data, and validation data if there is a file of it, and says what there is to say."""
    encoder = Encoder(text, request.template_variables)
    longest = min(request.schedule.max_length, text.context_length)
    read = read_examples(request.data, encoder, longest, ReadingProgress(str(request.data), out))
    held: ReadFile | float | None = None if isinstance(request.validation, Path) else request.validation
    if isinstance(request.validation, Path):
        held = read_examples(request.validation, encoder, longest, ReadingProgress(str(request.validation), out))
    examples = examples_of(read, held, request.schedule.seed, tuple(encoder.notes))
    counts = f"{len(examples.training)} examples ({read.form}), {examples.num_tokens} tokens, {examples.num_learned} learned"
    _say(out, f"{counts}; {len(examples.validation)} held out")
    for note in examples.notes:
        _say(out, f"note: {note}")
    return TrainingData(examples, read.form)


def _outcome(session: TrainingSession, partial: PartialModel) -> TrainingOutcome:
    """Trains. Of numbers that diverged nothing is left: going on with them would be of no use."""
    try:
        return session.run()
    except Diverged:
        partial.remove()
        raise


def _say(out: TextIO, line: str) -> None:
    out.write(f"{line}\n")
    out.flush()


def _write(model: Any, report: dict[str, Any], outcome: TrainingOutcome, directory: Path) -> None:
    write_adapter(model, directory)
    write_json(directory / "training.json", report)
    (directory / "loss.svg").write_text(chart(outcome.steps, outcome.validations), encoding="utf-8")
    (directory / "README.md").write_text(card(report), encoding="utf-8")
