"""Merges an adapter into its base: `ryzanstein merge BASE ADAPTER OUT`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted. Nothing is left of what is not done.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ryzanstein.files.models_home import model_path

_DTYPES = ("float32", "bfloat16", "float16")


def merge(
    base: Annotated[
        str,
        typer.Argument(
            metavar="BASE", help="The model: a directory with safetensors, a GGUF file, or the name of a fetched model."
        ),
    ],
    adapter: Annotated[Path, typer.Argument(metavar="ADAPTER", help="A directory that peft or `finetune` wrote.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The directory that is written.")],
    *,
    dtype: Annotated[str, typer.Option(help=f"The floats of OUT: {', '.join(_DTYPES)}.")] = "float32",
    force: Annotated[bool, typer.Option("--force", help="Replace the model that is there.")] = False,
) -> None:
    """Write a model with an adapter merged into its weights, as floats: `ryzanstein quantize` makes it small again."""
    if dtype not in _DTYPES:
        raise typer.BadParameter(f"{dtype!r} is not supported, only {', '.join(_DTYPES)}", param_hint="--dtype")
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is looked up: the base is here
    import torch

    from ryzanstein.tools.finetune.merging import merge as run
    from ryzanstein.worker.refusal import ModelRefused

    try:
        run(model_path(base), adapter, out, getattr(torch, dtype), force=force)
    except ModelRefused as refusal:
        _fail(str(refusal))
    except OSError as error:
        _fail(f"{error.filename or out}: {error.strerror or error}")
    except KeyboardInterrupt:
        _fail("interrupted: nothing was written", 130)
    typer.echo(f"{out}: {base} with {adapter}")


def _fail(message: str, code: int = 1) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(code) from None


def main() -> None:
    """Runs the command. SIGTERM acts like Ctrl-C."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.run(merge)


if __name__ == "__main__":
    main()
