"""The subcommands that are separate programs: one per service, `synthesize` and `bench`.

They replace this process (exec), so signals, exit codes and `--help` are the program's own. A command whose extras are not
installed says what to install.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from types import MappingProxyType

import typer

from ryzanstein.process.process_start import become_service

# One package of each extra stands for all of it.
_PACKAGES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "router": ("fastapi", "uvicorn", "httptools", "websockets", "msgspec"),
        "console": ("starlette", "uvicorn", "websockets", "markdown_it", "msgspec"),
        "node": ("tokenizers", "jinja2", "aiohttp"),
        "worker": ("torch", "tokenizers", "safetensors"),
        "finetune": ("torch", "tokenizers", "safetensors", "transformers", "peft", "accelerate"),
        "tls": ("cryptography",),
        "redis": ("redis",),
        "watch": ("textual",),
    }
)


def missing(*extras: str) -> str:
    """Returns which of the extras are not installed, with commas between them; empty: none."""
    return ",".join(extra for extra in extras if any(find_spec(package) is None for package in _PACKAGES[extra]))


def require(command: str, *extras: str) -> None:
    """Ends the command with exit code 2 and a sentence if one of the extras is not installed."""
    if wanted := missing(*extras):
        message = f"`ryzanstein {command}` needs more than the base package: pip install 'ryzanstein[{wanted}]'"
        typer.echo(message, err=True)
        raise typer.Exit(2)


PROGRAMS: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "router": ("ryzanstein.router", "Run one router."),
        "orchestrator": ("ryzanstein.orchestrator", "Run the orchestrator."),
        "worker": ("ryzanstein.worker", "Run one node: its agent and its ranks."),
        "console": ("ryzanstein.console", "Run the page for people: chat with the cluster in a browser, and watch it."),
        "synthesize": ("ryzanstein.tools.synthesize.command", "Write a random checkpoint in the Hugging Face layout."),
        "convert": ("ryzanstein.tools.convert.command", "Convert between a GGUF file and the Hugging Face layout."),
        "quantize": ("ryzanstein.tools.quantize.command", "Write a quantized checkpoint, layer by layer."),
        "finetune": ("ryzanstein.tools.finetune.command", "Train a LoRA adapter for a model, on a CPU."),
        "merge": ("ryzanstein.tools.finetune.merge_command", "Merge an adapter into the weights of its base."),
        "vllm-plugin": ("ryzanstein.tools.vllm_plugin", "Write what vLLM loads of ours into a folder, for its PYTHONPATH."),
        "inspect": ("ryzanstein.tools.inspect", "Show what a model is, and how much memory a node needs for it."),
        "simulate": (
            "ryzanstein.lab.simulation",
            "Simulate whole clusters in one process: one seed, or many new ones.",
        ),
        "load": ("ryzanstein.lab.load", "Send a load to a cluster: measure it and check every token."),
        "bench": (
            "ryzanstein.lab.bench.engine",
            "Run a benchmark: engine, loading, collectives, scaling, predict, machine, suite, compare, quality, kv, "
            "router, control, adapters, failover, soak.",
        ),
    }
)

# Benchmarks of programs other than the worker, by the first argument of `bench`.
BENCHMARKS: Mapping[str, str] = MappingProxyType(
    {
        "router": "ryzanstein.lab.bench.router",
        "control": "ryzanstein.lab.bench.control",
        "adapters": "ryzanstein.lab.bench.adapters",
        "failover": "ryzanstein.lab.chaos",
        "soak": "ryzanstein.lab.soak",
    }
)

# A separate distribution.
_LABORATORY = "ryzanstein.lab"
_SERVICES = ("router", "orchestrator", "worker", "console")
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def add_programs(app: typer.Typer) -> None:
    """Adds one subcommand per program; all arguments are passed on unchanged."""
    for name, (module, help_text) in PROGRAMS.items():
        _add(app, name, module, help_text)


def _add(app: typer.Typer, name: str, module: str, help_text: str) -> None:
    @app.command(name, help=help_text, context_settings=_PASS_ON, add_help_option=False)
    def become(context: typer.Context) -> None:
        program, arguments = module, context.args
        if name == "bench" and arguments and arguments[0] in BENCHMARKS:
            program, arguments = BENCHMARKS[arguments[0]], arguments[1:]
        if program.startswith(_LABORATORY) and find_spec(_LABORATORY) is None:
            where = "install it from the repository: pip install ./lab"
            typer.echo(f"`ryzanstein {name}` is in a package of its own, which is not installed; {where}", err=True)
            raise typer.Exit(2)
        require(name, *_extras(program, arguments))
        command = [sys.executable, "-P", "-m", program, *arguments]
        if name in _SERVICES:
            become_service(command)
        os.execv(command[0], command)


def _extras(program: str, arguments: Sequence[str]) -> tuple[str, ...]:
    """Returns the extras that a program imports. A node beside a server needs no torch, see its settings."""
    if program == "ryzanstein.worker":
        beside = "RYZANSTEIN_ENGINE" in os.environ or any(each.partition("=")[0] == "--engine" for each in arguments)
        return ("node",) if beside else ("worker",)
    if program == "ryzanstein.tools.vllm_plugin":
        return ("node",)
    if program.startswith("ryzanstein.tools.finetune"):
        return ("finetune",)
    if program.startswith("ryzanstein.tools"):
        return ("worker",)
    service = program.rpartition(".")[2]
    return (service,) if program in ("ryzanstein.router", "ryzanstein.console") else ()
