"""`ryzanstein vllm-plugin DIR`: what vLLM loads of ours, for its PYTHONPATH."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from ryzanstein.worker.engines.child.command import SAMPLER
from ryzanstein.worker.engines.vllm.packages import write_plugin


def vllm_plugin(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where the packages are written; made if it is missing.")],
) -> None:
    """Write the packages that our sampler in vLLM needs into a folder, in the versions of this installation.

    Nothing of it is installed: vLLM finds it on its PYTHONPATH.
    """
    try:
        write_plugin(folder)
    except OSError as error:
        typer.echo(f"{folder}: {error}", err=True)
        raise typer.Exit(1) from None
    path = shlex.quote(str(folder.resolve()))
    typer.echo(f"PYTHONPATH={path} vllm serve MODEL --logits-processors {SAMPLER}")


def main() -> None:
    typer.run(vllm_plugin)


if __name__ == "__main__":
    main()
