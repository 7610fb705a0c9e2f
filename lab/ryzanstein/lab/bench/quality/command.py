"""The command `ryzanstein bench quality`."""

from __future__ import annotations

import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from tokenizers import Tokenizer

from ryzanstein import errors
from ryzanstein.lab.bench.engine.report import publish, refusals_as_exit
from ryzanstein.lab.bench.engine.suite.machine import SuiteMachine
from ryzanstein.lab.bench.quality.choice_of_texts import read_texts
from ryzanstein.lab.bench.quality.document import (
    SCHEMA,
    QualityDocument,
    QualityMachine,
    QualitySettings,
    QualityText,
    read_quality,
)
from ryzanstein.lab.bench.quality.llama_model import find_llama
from ryzanstein.lab.bench.quality.measurement import QualityMeasurement, QualityWork
from ryzanstein.lab.bench.quality.report import as_markdown
from ryzanstein.lab.bench.quality.rows import PEERS, RowPlan, formats_of, plan_rows
from ryzanstein.process.allotment import whole_cores
from ryzanstein.worker.text.model_files import ModelFiles

_MOST_TOKENS = 10**7


@dataclass(frozen=True, slots=True)
class QualityOptions:
    """How much is measured; `--help` describes each. Numbers of tokens are for each text or prompt."""

    tokens: int
    window: int
    prompts: int
    prompt_tokens: int
    new_tokens: int
    prefill_tokens: int
    rounds: int
    threads: int

    def check(self, context_length: int) -> None:
        """Raises INVALID_ARGUMENT with the option that does not fit the context or the texts."""
        longest = context_length - self.new_tokens
        bounds = {
            "window": (self.window, context_length, "the context of the reference"),
            "prompt-tokens": (self.prompt_tokens, min(longest, self.tokens), "what the context and --tokens leave"),
            "prefill-tokens": (self.prefill_tokens, min(longest, self.tokens), "what the context and --tokens leave"),
        }
        for name, (value, most, what) in bounds.items():
            if value > most:
                raise errors.invalid(name, f"must be at most {most}, {what}", value)


def quality(
    *,
    model: Annotated[list[Path], typer.Option(help="directory or GGUF file, repeated; the first is the reference")],
    formats: Annotated[str, typer.Option(help="formats of directories of float weights, comma-separated")] = "none,fp16,int8",
    text: Annotated[
        list[str] | None,
        typer.Option(help="licences, program, languages, dialogues or a file, repeated; default: the first three"),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=_MOST_TOKENS, help="of each text")] = 20_000,
    window: Annotated[int, typer.Option(min=8, max=2**20, help="tokens that are read from an empty context")] = 2048,
    prompts: Annotated[int, typer.Option(min=1, max=1000, help="greedy answers for each text")] = 8,
    prompt_tokens: Annotated[int, typer.Option(min=4, max=2**20, help="of a greedy answer")] = 192,
    new_tokens: Annotated[int, typer.Option(min=2, max=4096, help="of a greedy answer, and of a timed one")] = 64,
    prefill_tokens: Annotated[int, typer.Option(min=1, max=2**20, help="prompt of a timed answer")] = 512,
    rounds: Annotated[int, typer.Option(min=1, max=100, help="timed answers of each row")] = 5,
    threads: Annotated[int, typer.Option(min=0, max=1024, help="0: all cores")] = 0,
    peers: Annotated[str, typer.Option(help="llama.cpp: run the GGUF files with it too")] = "",
    judges: Annotated[Path, typer.Option(help="environment that has llama.cpp, from .ci/parts")] = Path("build/judges"),
    json_path: Annotated[Path, typer.Option("--json", help="write JSON here as rows finish; continues what is there")],
    report: Annotated[Path | None, typer.Option(help="write the tables to this file, in Markdown")] = None,
) -> None:
    """Measure what weight formats cost: perplexity, divergence, greedy answers, bytes and speed."""
    with refusals_as_exit() as people:
        options = QualityOptions(
            tokens, window, prompts, prompt_tokens, new_tokens, prefill_tokens, rounds, threads or whole_cores()
        )
        _check_outputs(json_path, report)
        plans = plan_rows(model, formats_of(formats), {name: find_llama(judges) for name in _peers(peers)})
        work = _work(plans[0], text or [], options)
        document = _document(json_path, work.settings, people)
        QualityMeasurement(work, document, people, lambda done: _save(done, json_path)).run(plans)
        tables = as_markdown(document, _command())
        if report is not None:
            report.parent.mkdir(parents=True, exist_ok=True)
            report.write_text(tables)
        else:
            typer.echo(tables, nl=False)
        if document.failed:
            raise typer.Exit(1)


def _check_outputs(json_path: Path, report: Path | None) -> None:
    """Raises INVALID_ARGUMENT for what cannot be replaced by a file, before hours of work."""
    for name, path in (("json", json_path), ("report", report)):
        if path is not None and (str(path) == "-" or (path.exists() and not path.is_file())):
            raise errors.invalid(name, "must be the path of a file", str(path))


def _peers(text: str) -> list[str]:
    names = [name for name in text.split(",") if name]
    if not set(names) <= set(PEERS):
        raise errors.invalid("peers", f"must be {', '.join(PEERS)}", text)
    return names


def _work(reference: RowPlan, texts: list[str], options: QualityOptions) -> QualityWork:
    files = ModelFiles.read(reference.model)
    options.check(files.context_length)
    read = read_texts(Tokenizer.from_str(files.tokenizer_json), texts, options.tokens, options.prompts)
    settings = QualitySettings(
        reference=reference.name,
        texts=[QualityText(each.name, each.source, each.digest) for each in read],
        num_tokens=options.tokens,
        window=options.window,
        prompts=options.prompts,
        prompt_tokens=options.prompt_tokens,
        new_tokens=options.new_tokens,
        prefill_tokens=options.prefill_tokens,
        threads=options.threads,
        rounds=options.rounds,
    )
    return QualityWork(settings, read, files.vocab_size)


def _document(path: Path, settings: QualitySettings, people: Console) -> QualityDocument:
    """Returns the document at the path, or a new one. Raises INVALID_ARGUMENT for one of other settings."""
    if path.exists():
        document = read_quality(path)
        if document.settings != settings:
            raise errors.invalid("json", "has other settings or texts: remove it, or name another", str(path))
        people.print(f"{path}: continued", markup=False)
        return document
    machine = SuiteMachine.here()
    return QualityDocument(SCHEMA, QualityMachine(machine.cpu, machine.cores, machine.commit, []), settings, [])


def _save(document: QualityDocument, path: Path) -> None:
    publish(msgspec.to_builtins(document), [], str(path))


def _command() -> str:
    """Returns how this process was started, as a user writes it."""
    return shlex.join(["ryzanstein", "bench", *sys.argv[1:]])
