"""Writes a quantized checkpoint: `ryzanstein quantize SRC DST`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted. What is finished when it is
interrupted, killed or out of disk waits in a directory beside DST; the same command goes on.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from typing import Annotated, NoReturn

import torch
import typer

from ryzanstein.tools.quantize.request import CALIBRATED, METHODS, WORST, Budget, Method, Request
from ryzanstein.tools.quantize.run import quantize_model
from ryzanstein.worker.refusal import ModelRefused

_BITS = (4, 8)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def quantize(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A directory with safetensors, or a GGUF file.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="The directory that is written.")],
    *,
    method: Annotated[str, typer.Option(help=f"One of {', '.join(METHODS)}.")],
    bits: Annotated[int, typer.Option(help="Bits of a weight for rtn, gptq, awq: 4 or 8. auto: the fewest.")] = 4,
    group: Annotated[
        int | None, typer.Option(help="Inputs with one scale. Default: 32 below a billion parameters, else 128.")
    ] = None,
    zero_points: Annotated[bool, typer.Option("--zero-points", help="Groups have a zero point too.")] = False,
    act_order: Annotated[bool, typer.Option("--act-order", help="GPTQ: the largest activations first.")] = False,
    calibration: Annotated[
        list[Path] | None, typer.Option(help="UTF-8 text, or several: gptq, awq, auto need it; all measure with it.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Tokens to calibrate on; a third as many are held out.")] = 32768,
    budget: Annotated[
        str | None,
        typer.Option(help="Relative loss of perplexity on held-out text, such as 1%; auto: or a size, such as 300MB."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is there.")] = False,
) -> None:
    """Quantize a model, layer by layer, to a directory that transformers reads with compressed-tensors."""
    request = Request(
        _method(method),
        bits,
        group,
        zero_points,
        act_order,
        tuple(calibration or ()),
        tokens,
        None if budget is None else _budget(budget),
    )
    _check(request)
    try:
        quantize_model(source, target, request, sys.stderr, force=force)
    except ModelRefused as refusal:
        _fail(str(refusal))
    except OSError as error:
        _fail(f"{error.filename or target}: {error.strerror or error}")
    except KeyboardInterrupt:
        typer.echo("interrupted: the same command goes on from the last finished layer", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"{target}: quantized from {source}")


def _method(name: str) -> Method:
    if name not in METHODS:
        raise typer.BadParameter(f"{name!r} is not supported, only {', '.join(METHODS)}", param_hint="--method")
    return name


def _budget(text: str) -> Budget:
    size = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmg]i?)b", text.strip().lower())
    if size is not None:
        return Budget(WORST, int(float(size[1]) * _UNITS[size[2]]))
    percent = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text.strip())
    if percent is None:
        raise typer.BadParameter(f"{text!r} is neither a percentage such as 1% nor a size such as 300MB", param_hint="--budget")
    return Budget(float(percent[1]) / 100)


def _check(request: Request) -> None:
    """Raises BadParameter for options that have no meaning together."""
    if request.bits not in _BITS:
        raise typer.BadParameter(f"{request.bits}: must be 4 or 8", param_hint="--bits")
    if request.group is not None and (request.group < 16 or request.group & (request.group - 1)):
        raise typer.BadParameter(f"{request.group}: must be a power of two, at least 16", param_hint="--group")
    if request.zero_points and request.bits == 8:
        raise typer.BadParameter("weights of 8 bits have no zero points", param_hint="--zero-points")
    if request.method in CALIBRATED and not request.calibration:
        raise typer.BadParameter(f"--method {request.method} needs a text", param_hint="--calibration")
    _check_budget(request)


def _check_budget(request: Request) -> None:
    if request.budget is None:
        return
    if not request.calibration:
        raise typer.BadParameter("needs --calibration: the loss is measured on it", param_hint="--budget")
    if request.method == "auto" and not 0 < request.budget.loss <= WORST:
        raise typer.BadParameter(f"{request.budget.loss:.2%}: more than 0, at most {WORST:.0%}", param_hint="--budget")
    if request.method != "auto" and request.budget.num_bytes is not None:
        raise typer.BadParameter("a size is chosen for with --method auto only", param_hint="--budget")


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1) from None


def main() -> None:
    """Runs the command. SIGTERM acts like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with torch.inference_mode():
        typer.run(quantize)


if __name__ == "__main__":
    main()
