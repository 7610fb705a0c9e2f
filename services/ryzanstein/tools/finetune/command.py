"""Trains an adapter for a model on a CPU: `ryzanstein finetune BASE DATA --out DIR`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted. What is finished when it is interrupted,
killed or out of disk waits in a directory beside DIR; the same command goes on.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from ryzanstein.errors import RyzansteinError
from ryzanstein.files.models_home import model_path
from ryzanstein.generation.prompts import template_variables
from ryzanstein.tools.finetune.request import MAX_RANK, FinetuneRequest, LoraShape, Schedule, Watching

_QUANTIZATIONS = ("none", "int8")
_COMPUTES = ("auto", "float32", "bfloat16")


def finetune(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="The model: a directory with safetensors, a GGUF file, or the name of a fetched model."
        ),
    ],
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="JSON lines: messages, instruction/output, prompt/completion or text.")
    ],
    *,
    out: Annotated[Path, typer.Option(help="The directory that is written.")],
    val: Annotated[str | None, typer.Option(help="Data to validate with: a file, or a share of DATA such as 5%.")] = None,
    rank: Annotated[int, typer.Option(min=1, max=MAX_RANK, help="Rank of the adapter.")] = 16,
    alpha: Annotated[float | None, typer.Option(help="Alpha of the adapter. Default: twice the rank.")] = None,
    targets: Annotated[str, typer.Option(help="Linear layers: all, attention, or ends of names with commas.")] = "all",
    epochs: Annotated[int, typer.Option(min=1, help="How often the data are read.")] = 3,
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 8,
    accumulate: Annotated[int, typer.Option(min=1, help="Batches of a step.")] = 1,
    learning_rate: Annotated[float, typer.Option(help="The highest one: it rises for 3 % of the steps, then falls.")] = 2e-4,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens of an example; more are cut off.")] = 1024,
    packing: Annotated[bool, typer.Option("--packing", help="Put several examples into a row.")] = False,
    compute: Annotated[str, typer.Option(help=f"How matrices are multiplied: {', '.join(_COMPUTES)}.")] = "auto",
    checkpointing: Annotated[bool, typer.Option("--checkpointing", help="Less memory, a third more time.")] = False,
    validate_every: Annotated[int | None, typer.Option(min=1, help="Steps between validations.")] = None,
    patience: Annotated[int, typer.Option(min=0, help="Validations without progress before it stops; 0: never.")] = 3,
    save_every: Annotated[float, typer.Option(min=0, help="Seconds between checkpoints.")] = 120.0,
    seed: Annotated[int, typer.Option(min=0, max=2**31 - 1)] = 0,
    quantization: Annotated[str, typer.Option(help=f"How the base is served: {', '.join(_QUANTIZATIONS)}.")] = "none",
    chat_template: Annotated[Path | None, typer.Option(help="A chat template in place of the model's.")] = None,
    chat_template_kwargs: Annotated[str, typer.Option(help="Variables of the chat template, a JSON object.")] = "",
    gguf: Annotated[bool, typer.Option("--gguf", help="Write the adapter as a GGUF file too.")] = False,
    estimate: Annotated[bool, typer.Option("--estimate", help="Only say what it would take.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an adapter that was written there.")] = False,
) -> None:
    """Train a LoRA adapter on the weights that are served, quantized or not."""
    if not 0 < learning_rate < 1:
        raise typer.BadParameter(f"{learning_rate}: must be between 0 and 1", param_hint="--learning-rate")
    lora = LoraShape(rank, 2.0 * rank if alpha is None else _positive(alpha), _targets(targets))
    schedule = Schedule(
        epochs=epochs,
        batch=batch,
        accumulate=accumulate,
        learning_rate=learning_rate,
        max_length=max_length,
        packing=packing,
        checkpointing=checkpointing,
        seed=seed,
        compute=_known(compute, _COMPUTES, "--compute"),
    )
    watching = Watching(validate_every, patience, save_every)
    validation = None if val is None else _validation(val)
    request = FinetuneRequest(
        *(model_path(base), data, out, validation, lora, schedule, watching),
        int8=_known(quantization, _QUANTIZATIONS, "--quantization") == "int8",
        chat_template=chat_template,
        template_variables=_variables(chat_template_kwargs),
        gguf=gguf,
        estimate=estimate,
        force=force,
    )
    _train(request)


def _positive(alpha: float) -> float:
    if not 0 < alpha < 1e6:
        raise typer.BadParameter(f"{alpha}: must be more than 0", param_hint="--alpha")
    return alpha


def _targets(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(filter(None, (name.strip() for name in text.split(",")))))
    if not names or (len(names) > 1 and {"all", "attention"} & set(names)):
        raise typer.BadParameter(f"{text!r} is neither all nor attention nor names of layers", param_hint="--targets")
    return names


def _known(name: str, known: Sequence[str], option: str) -> str:
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not supported, only {', '.join(known)}", param_hint=option)
    return name


def _variables(text: str) -> str:
    try:
        template_variables(text)
    except RyzansteinError as error:
        raise typer.BadParameter(str(error), param_hint="--chat-template-kwargs") from None
    return text


def _validation(text: str) -> Path | float:
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if percent is None:
        return Path(text)
    share = float(percent[1]) / 100
    if not 0 < share < 1:
        raise typer.BadParameter(f"{text}: must be more than 0 % and less than 100 %", param_hint="--val")
    return share


class _Stop:
    """Whether SIGINT or SIGTERM came. The second one ends the process at once."""

    def __init__(self) -> None:
        self._event = threading.Event()

    def __call__(self) -> bool:
        return self._event.is_set()

    @contextmanager
    def listening(self) -> Iterator[None]:
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, number: int, frame: Any) -> None:
        if self._event.is_set():
            raise KeyboardInterrupt
        self._event.set()
        typer.echo("\nstops after this step; once more: at once", err=True)


def _train(request: FinetuneRequest) -> None:
    stop = _Stop()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up: the base is here
    import torch

    from ryzanstein.tools.finetune.run import finetune as run
    from ryzanstein.tools.finetune.training.precision import fastest
    from ryzanstein.tools.finetune.training.session import Stopped
    from ryzanstein.tools.quantize.partial import TRAINING, begun_with
    from ryzanstein.worker.refusal import ModelRefused

    torch.set_num_threads(min(torch.get_num_threads(), len(os.sched_getaffinity(0))))
    if request.schedule.compute == "auto":
        # What goes on is computed as it began: two measurements need not agree.
        begun = begun_with(request.out.resolve(), "--compute", TRAINING)
        compute = begun if isinstance(begun, str) and begun in _COMPUTES[1:] else fastest()
        request = replace(request, schedule=replace(request.schedule, compute=compute))
    try:
        with stop.listening():
            run(request, sys.stderr, stop)
    except Stopped as stopped:
        _fail(f"{stopped}: the same command goes on from there", 130)
    except RyzansteinError as refusal:
        hint = ": name a file with --chat-template, or train on prompt/completion or text" if _lacks_template(refusal) else ""
        _fail(f"{refusal.message.partition(':')[0] if hint else refusal}{hint}")
    except ModelRefused as refusal:
        _fail(str(refusal))
    except OSError as error:
        _fail(f"{error.filename or request.out}: {error.strerror or error}")
    except KeyboardInterrupt:
        _fail("interrupted: the same command goes on from the last checkpoint", 130)
    if not request.estimate:
        typer.echo(f"{request.out}: an adapter for {request.base}")


def _lacks_template(error: RyzansteinError) -> bool:
    return error.reason == "NO_CHAT_TEMPLATE"


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code) from None


def main() -> None:
    """Runs the command."""
    typer.run(finetune)


if __name__ == "__main__":
    main()
