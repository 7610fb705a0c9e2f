"""Shows what a model is, how it can be divided, and how much memory a node needs for it: `ryzanstein inspect MODEL`.

Reads the same headers as a node does before it loads, no weights, and does not load torch. The
numbers are upper bounds, as those by which a node refuses a model. Exit codes: 0 shown, 1 the model
is refused or does not fit, 2 wrong usage.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, NoReturn

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.table import Table

from ryzanstein.errors import RyzansteinError
from ryzanstein.files.model_paths import model_location, model_name
from ryzanstein.files.models_home import model_path
from ryzanstein.process.gpus import Device
from ryzanstein.worker.config import WorkerSettings
from ryzanstein.worker.engine.extents import SLOTS_OF_SEQUENCE
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.quantization import Quantization
from ryzanstein.worker.sizing import MemoryNeed, node_memory_bytes
from ryzanstein.worker.text.calling import GENERIC
from ryzanstein.worker.text.tokenizer import TextModel

_MOST_RANKS = 64
_STEP_TOKENS = 512


def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Directory, GGUF file, or name of a fetched model.")],
    *,
    tp: Annotated[int, typer.Option(min=1, max=_MOST_RANKS, help="Ranks of the node.")] = 1,
    context: Annotated[
        int | None, typer.Option(min=1, show_default="the model's", help="Tokens of one conversation, its answer included.")
    ] = None,
    sequences: Annotated[int, typer.Option(min=1, max=4096, help="Conversations that run at once.")] = 64,
    kv_bytes: Annotated[
        int, typer.Option(min=0, show_default="at most 1 GiB", help="Size of each rank's KV cache, as the node's setting.")
    ] = 0,
    device: Annotated[Device, typer.Option(help="Device of the ranks.")] = "auto",
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], typer.Option(help="As the node's setting.")] = "auto",
    quantization: Annotated[Quantization, typer.Option(help="As the node's setting.")] = "none",
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Show what a model is and how much memory a node needs for it, before anything is loaded."""
    path = model_path(model)
    if not path.exists():
        _fail(f"{path} does not exist, and no fetched model has this name")
    try:
        given = {"model": str(path), "tp": tp, "max_sequences": sequences, "kv_bytes": kv_bytes, "device": device}
        given |= {"dtype": dtype, "quantization": quantization, "max_tokens_per_step": max(_STEP_TOKENS, sequences)}
        settings = WorkerSettings.model_validate(given)
        need = MemoryNeed.of(model_location(path), settings)
        facts = facts_of(model_name(path), need, context) | text_facts_of(TextModel.load(path))
    except ModelRefused as refusal:
        _fail(str(refusal))
    except RyzansteinError as error:
        _fail(error.message)
    except OSError as error:
        _fail(f"{error.filename or path}: {error.strerror or error}")
    except ValidationError as error:
        _fail("; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()))
    if as_json:
        print(json.dumps(facts, indent=2))
    else:
        _show(facts)
    if not facts["fits"]:
        raise typer.Exit(1)


def facts_of(name: str, need: MemoryNeed, context: int | None) -> dict[str, Any]:
    """Returns what is shown. Sizes are in bytes, for all ranks of the node together unless the key says otherwise."""
    spec, settings = need.spec, need.settings
    cache = need.cache_size()
    length = min(context or spec.context_length, spec.context_length)
    blocks = cache.extents.blocks_for(length)
    memory = node_memory_bytes(settings)
    return {
        "model": name,
        "architecture": spec.model_type,
        "layers": spec.num_layers,
        "hidden_size": spec.hidden_size,
        "heads": spec.num_heads,
        "kv_heads": spec.num_kv_heads,
        "vocabulary": spec.vocab_size,
        "context": spec.context_length,
        "parameters": need.num_parameters,
        "stored_bytes": need.stored_bytes,
        "possible_tp": need.possible_tp(_MOST_RANKS),
        "tp": settings.tp,
        "device": "cuda" if need.on_gpu else "cpu",
        "weight_bytes": need.weight_bytes,
        "kv_cache_bytes": need.cache_bytes,
        "rank_bytes": need.rank_bytes,
        "step_or_load_bytes": need.peak_bytes - need.cache_bytes if need.peak_bytes > need.cache_bytes else 0,
        "total_bytes": need.total_bytes,
        "node_memory_bytes": memory,
        "conversation_tokens": length,
        "conversation_bytes": (blocks * cache.block_bytes + SLOTS_OF_SEQUENCE * cache.state_bytes) * settings.tp,
        "state_bytes": cache.state_bytes * settings.tp,
        "conversations": min(cache.max_sequences or settings.max_sequences, settings.max_sequences, cache.num_blocks // blocks),
        "fits": need.total_bytes <= memory and cache.num_blocks >= blocks,
    }


def text_facts_of(text: TextModel) -> dict[str, Any]:
    """Returns what a model may be asked for. `tools`: the form in which it calls functions, `generic` where it knows none."""
    if text.embedding is not None:
        return {"answers": "vectors", "tools": "", "reasoning": False, "infill": False}
    if text.template is None:
        return {"answers": "text", "tools": "", "reasoning": False, "infill": text.fills_in}
    calling = text.calling
    tools = calling.family if calling.native else GENERIC
    return {"answers": "chat", "tools": tools, "reasoning": calling.thinking, "infill": text.fills_in}


def _show(facts: dict[str, Any]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(
        f"{facts['model']}: {facts['architecture']}, {facts['parameters'] / 1e6:,.1f} M parameters in "
        f"{_mib(facts['stored_bytes'])}, {facts['layers']} layers, {facts['heads']} heads ({facts['kv_heads']} of keys and "
        f"values), vocabulary {facts['vocabulary']:,}, context {facts['context']:,}",
        markup=False,
    )
    console.print(_abilities(facts))
    possible = facts["possible_tp"]
    console.print(f"runs on up to {possible[-1]} ranks" if possible[-1] > 1 else "runs on one rank")
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    rows = {
        "weights": "weight_bytes",
        "KV cache": "kv_cache_bytes",
        "largest steps, or loading": "step_or_load_bytes",
        "processes": "rank_bytes",
        "needed at most": "total_bytes",
        "this node has": "node_memory_bytes",
    }
    for title, key in rows.items():
        table.add_row(title, _mib(facts[key]))
    console.print(f"a node with {facts['tp']} rank{'s' if facts['tp'] > 1 else ''} on {facts['device']}:")
    console.print(table)
    console.print(
        f"a conversation of {facts['conversation_tokens']:,} tokens takes {_mib(facts['conversation_bytes'])} of the cache: "
        f"{facts['conversations']} fit at once"
    )
    if facts["state_bytes"]:
        console.print(f"of this, {SLOTS_OF_SEQUENCE} slots of {_mib(facts['state_bytes'])} are for its state")
    if facts["total_bytes"] > facts["node_memory_bytes"]:
        console.print("it does not fit: a smaller --kv-bytes, fewer --sequences or --quantization int8 need less", style="red")
    elif not facts["conversations"]:
        console.print("no conversation of this length fits the cache: give it more with --kv-bytes", style="red")


def _abilities(facts: dict[str, Any]) -> str:
    match facts["answers"]:
        case "vectors":
            return "answers with vectors"
        case "text":
            able = ["text: it has no chat template"]
        case _:
            called = "as any text" if facts["tools"] == GENERIC else f"in the form {facts['tools']}"
            able = [f"chats: calls functions {called}"]
    able += ["reasons before it answers"] if facts["reasoning"] else []
    able += ["fills in the middle"] if facts["infill"] else []
    return f"answers with {', '.join(able)}" if facts["answers"] == "text" else ", ".join(able)


def _mib(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB" if count < 10 * 2**30 else f"{count / 2**30:,.1f} GiB"


def _fail(text: str) -> NoReturn:
    typer.echo(text, err=True)
    raise typer.Exit(1)


def main() -> None:
    """Runs the command line."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(inspect)
    app(prog_name="ryzanstein inspect")


if __name__ == "__main__":
    main()
