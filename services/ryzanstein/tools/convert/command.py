"""Converts a model between a GGUF file and a directory in the Hugging Face layout: `ryzanstein convert SRC DST`.

Exit codes: 0 done, 1 refused or failed, 2 wrong usage, 130 interrupted. Nothing is left of a
conversion that is not done.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.tools.convert.to_checkpoint import to_directory
from ryzanstein.worker.kernels.functions import block_types
from ryzanstein.worker.refusal import ModelRefused

_DTYPES = {"bfloat16": block_types.BF16, "float32": block_types.F32}


def convert(
    source: Annotated[Path, typer.Argument(metavar="SRC", help="A GGUF file, or a directory with safetensors.")],
    target: Annotated[Path, typer.Argument(metavar="DST", help="What is written: the other of the two.")],
    *,
    kind: Annotated[
        str | None, typer.Option("--type", help=f"Type of the tensors of a GGUF file: {', '.join(WRITTEN)}. Default: bf16.")
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"What quantized tensors become: {', '.join(_DTYPES)}. Default: bfloat16.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace what is there.")] = False,
) -> None:
    """Convert a GGUF file to a directory of safetensors, or such a directory to a GGUF file."""
    from_directory = source.is_dir()
    given = ("--dtype", dtype) if from_directory else ("--type", kind)
    if given[1] is not None:
        raise typer.BadParameter(
            f"has no meaning when SRC is a {'directory' if from_directory else 'file'}", param_hint=given[0]
        )
    try:
        if from_directory:
            to_file(source, target, _chosen("--type", kind or "bf16", WRITTEN), sys.stderr, force=force)
        else:
            to_directory(source, target, _chosen("--dtype", dtype or "bfloat16", _DTYPES), sys.stderr, force=force)
    except ModelRefused as refusal:
        _fail(str(refusal))
    except OSError as error:
        _fail(f"{error.filename or target}: {error.strerror or error}")
    except KeyboardInterrupt:
        typer.echo("interrupted: nothing was written", err=True)
        raise typer.Exit(130) from None
    typer.echo(f"{target}: converted from {source}")


def _chosen(option: str, name: str, known: Mapping[str, block_types.BlockType]) -> block_types.BlockType:
    if name not in known:
        raise typer.BadParameter(f"{name!r} is not supported, only {', '.join(known)}", param_hint=option)
    return known[name]


def _fail(message: str) -> NoReturn:
    typer.echo(message, err=True)
    raise typer.Exit(1) from None


def main() -> None:
    """Runs the command. SIGTERM acts like Ctrl-C, so that what was written is removed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    typer.run(convert)


if __name__ == "__main__":
    main()
