"""The command `ryzanstein bench kv`."""

from __future__ import annotations

import os
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import msgspec
import torch
import typer
from rich.console import Console
from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.files.model_paths import model_name
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.lab.bench.engine.suite.machine import SuiteMachine
from ryzanstein.lab.bench.kv.document import SCHEMA, KvDocument, KvSettings, read_kv
from ryzanstein.lab.bench.kv.measurement import PARTS, KvMeasurement, KvWork
from ryzanstein.lab.bench.kv.options import OPTIONS, KvOption
from ryzanstein.lab.bench.kv.report import as_markdown
from ryzanstein.lab.bench.kv.sequence import SharedModel
from ryzanstein.lab.bench.kv.sparse import DEFAULT_RULES, rules_of
from ryzanstein.lab.bench.quality.choice_of_texts import read_texts
from ryzanstein.lab.bench.quality.document import QualityMachine, QualityText
from ryzanstein.process.allotment import whole_cores
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.model.loading import load_model
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions
from ryzanstein.worker.text.model_files import ModelFiles


def kv(
    *,
    model: Annotated[Path, typer.Option(help="directory or GGUF file")],
    options: Annotated[str, typer.Option(help="names of rows, separated by /; the first row is always measured")] = "",
    parts: Annotated[str, typer.Option(help="comma-separated; default: all")] = ",".join(PARTS),
    text: Annotated[
        list[str] | None,
        typer.Option(help="licences, program, languages, dialogues or a file, repeated; default: the first three"),
    ] = None,
    windows: Annotated[str, typer.Option(help="lengths in tokens, comma-separated")] = "4096,16384",
    num_windows: Annotated[int, typer.Option(min=1, max=10**4, help="of each length and text")] = 1,
    every: Annotated[int, typer.Option(min=1, max=1024, help="one of so many tokens is scored")] = 4,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="greedy answers for each text")] = 2,
    prompt_tokens: Annotated[int, typer.Option(min=4, max=2**20, help="of a greedy answer")] = 512,
    new_tokens: Annotated[int, typer.Option(min=2, max=4096, help="of a greedy answer")] = 256,
    pass_keys: Annotated[str, typer.Option(help="lengths of prompts, comma-separated")] = "2048,8192,16384,30000",
    batches: Annotated[str, typer.Option(help="of timed calls of attention")] = "1,8,32",
    contexts: Annotated[str, typer.Option(help="of timed calls of attention")] = "1024,2048,4096,8192,16384,32768",
    sparse: Annotated[str, typer.Option(help="rules of sparse attention, separated by /")] = DEFAULT_RULES,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="0: all cores")] = 0,
    seconds: Annotated[
        float, typer.Option(min=1, max=1e9, help="stop after the piece that takes longer; run again to continue")
    ] = 1e9,
    json_path: Annotated[Path, typer.Option("--json", help="write JSON here as pieces finish; continues what is there")],
) -> None:
    """Measure what compressed keys and values cost and gain: memory, time, perplexity, answers, pass keys."""
    with refusals_as_exit() as people:
        chosen, lengths = _chosen(options), _numbers("windows", windows)
        torch.set_num_threads(threads or whole_cores())
        rules, asked = rules_of(sparse), _numbers("pass-keys", pass_keys)
        num_tokens = max(max(lengths) * num_windows, *asked)
        work = replace(_work(model, chosen, text or [], num_tokens, prompts), rules=rules)
        if max(lengths) > work.model.spec.context_length:
            raise errors.invalid("windows", f"must be at most the context of {work.model.spec.context_length}", max(lengths))
        settings = KvSettings(
            model=model_name(model),
            texts=[QualityText(each.name, each.source, each.digest) for each in work.texts],
            options=[option.name for option in chosen],
            windows=lengths,
            num_windows=num_windows,
            every=every,
            prompts=prompts,
            prompt_tokens=prompt_tokens,
            new_tokens=new_tokens,
            pass_key_contexts=asked,
            batches=_numbers("batches", batches),
            contexts=_numbers("contexts", contexts),
            threads=torch.get_num_threads(),
            sparse=[rule.name for rule in rules],
        )
        document = _document(json_path, settings, people)
        done = KvMeasurement(work, document, people, lambda: _save(document, json_path), seconds).run(_parts(parts))
        typer.echo(as_markdown(document, shlex.join(["ryzanstein", "bench", *sys.argv[1:]])), nl=False)
        if not done:
            people.print("not finished: run the same command again")


def _chosen(text: str) -> list[KvOption]:
    names = [name.strip() for name in text.split("/") if name.strip()] or [option.name for option in OPTIONS]
    unknown = set(names) - {option.name for option in OPTIONS}
    if unknown:
        raise errors.invalid("options", f"must be of {' / '.join(option.name for option in OPTIONS)}", text)
    return [option for option in OPTIONS if option is OPTIONS[0] or option.name in names]


def _parts(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not set(names) <= set(PARTS):
        raise errors.invalid("parts", f"must be of {', '.join(PARTS)}", text)
    return names


def _numbers(field: str, text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",") if part]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1 or max(numbers) > 2**20:
        raise errors.invalid(field, "must be whole numbers from 1 to 1048576, comma-separated", text)
    return numbers


def _work(model: Path, options: list[KvOption], texts: list[str], num_tokens: int, prompts: int) -> KvWork:
    tokenizer = Tokenizer.from_str(ModelFiles.read(model).tokenizer_json)
    try:
        loaded = load_model(model, TensorParallel(0, 1, LocalCollectives()), RunnerOptions(num_blocks=4, kernels="native"))
    except ModelRefused as refusal:
        raise errors.failed_precondition("MODEL_INVALID", f"{model}: {refusal}") from refusal
    kernels = loaded.kernels.native
    assert kernels is not None, "they were required"
    if loaded.spec.latent is not None:
        raise errors.failed_precondition("MODEL_INVALID", f"{model}: latents are not compressed")
    if loaded.spec.states:
        raise errors.failed_precondition("MODEL_INVALID", f"{model}: a model with states is not compressed")
    read = read_texts(tokenizer, texts, num_tokens, prompts)
    return KvWork(SharedModel(loaded.decoder, loaded.spec, kernels.attention), tokenizer, options, read)


def _document(path: Path, settings: KvSettings, people: Console) -> KvDocument:
    """Returns the document at the path, or a new one. Raises INVALID_ARGUMENT for one of other settings."""
    if path.exists():
        document = read_kv(path)
        if not document.settings.sparse:  # older than its rules, of which nothing is measured yet
            document.settings = msgspec.structs.replace(document.settings, sparse=settings.sparse)
        if document.settings != settings:
            raise errors.invalid("json", "has other settings or texts: remove it, or name another", str(path))
        people.print(f"{path}: continued", markup=False)
        return document
    machine = SuiteMachine.here()
    return KvDocument(SCHEMA, QualityMachine(machine.cpu, machine.cores, machine.commit, []), settings)


def _save(document: KvDocument, path: Path) -> None:
    document.machine.loads.append(round(os.getloadavg()[0], 2))
    publish(msgspec.to_builtins(document), [], str(path))
