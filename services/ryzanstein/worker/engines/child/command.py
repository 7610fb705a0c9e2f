"""How vLLM is started for a node: the command, and what its environment needs to find our sampler."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ryzanstein.worker.engines.vllm.board import VARIABLE
from ryzanstein.worker.engines.vllm.packages import plugin_packages

SAMPLER = "ryzanstein.worker.engines.vllm.inside.sampler:Sampler"
SERVED_NAME = "model"
OURS = (
    "--uds",
    "--host",
    "--port",
    "--served-model-name",
    "--model",
    "--tensor-parallel-size",
    "-tp",
    "--max-num-seqs",
    "--logits-processors",
    "--api-key",
    "--ssl-keyfile",
    "--api-server-count",
    "--root-path",
)
"""Flags that the node sets, and that `engine_args` may not."""


_SLEEP_MODE = "--enable-sleep-mode"


def check_arguments(arguments: Sequence[str]) -> None:
    """Raises ValueError if a flag is one that the node sets."""
    for word in arguments:
        if (flag := word.partition("=")[0].replace("_", "-")) in OURS:
            raise ValueError(f"engine_args: {flag} is set by the node")


def can_sleep(arguments: Sequence[str]) -> bool:
    """Returns whether vLLM is started so that it can free the memory of its model without ending."""
    return any(word.replace("_", "-") == _SLEEP_MODE for word in arguments)


def vllm_command(
    python: str, model: str, socket: Path, *, tp: int, max_sequences: int, arguments: Sequence[str]
) -> tuple[str, ...]:
    """Returns the command that serves a model on a socket."""
    return (
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        f"--model={model}",
        f"--uds={socket}",
        f"--served-model-name={SERVED_NAME}",
        f"--tensor-parallel-size={tp}",
        f"--max-num-seqs={max_sequences}",
        f"--logits-processors={SAMPLER}",
        *arguments,
    )


def vllm_environment(folder: Path, *, sleeps: bool = False) -> dict[str, str]:
    """Returns the environment of vLLM's processes. What our sampler needs is linked into the folder, and nothing beside it.

    `sleeps`: its paths for that are opened. They are others' too, that belong in no network: the socket is the agent's alone.

    The folder that we are installed in has other packages too, of other versions than vLLM's.
    """
    paths = []
    for number, (name, source) in enumerate(plugin_packages()):
        root = folder / f"packages-{number}"
        root.mkdir(exist_ok=True)
        link = root / name
        if not link.is_symlink():
            link.symlink_to(source)
        paths.append(str(root))
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "RYZANSTEIN_"))}
    statistics = os.environ.get("VLLM_NO_USAGE_STATS", "1")
    ours = {"PYTHONPATH": os.pathsep.join(paths), VARIABLE: str(board(folder)), "VLLM_NO_USAGE_STATS": statistics}
    return {**kept, **ours, **({"VLLM_SERVER_DEV_MODE": "1"} if sleeps else {})}


def board(folder: Path) -> Path:
    """Returns where the ranks write how far they are."""
    return folder / "board"
