"""The protocol of a runner.

Its one argument is its settings. Each request and each answer is a line of JSON.

The first answer line reports that the model is loaded: versions of the named packages, and other
facts. Loading is not timed. Standard output carries only answers; what a peer prints goes to
standard error.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol, TextIO


@dataclass(frozen=True)
class Settings:
    """The settings of a runner.

    `model` is a directory or file in the peer's format. `threads` is for all ranks together, on
    `cores`. A sequence has at most `max_tokens`, prompt and answer; the keys and values of
    `max_batch` of them in float32 are `cache_bytes`.
    """

    model: str
    quantization: str
    tp: int
    threads: int
    cores: list[int]
    max_batch: int
    max_tokens: int
    cache_bytes: int


@dataclass(frozen=True)
class RunnerAnswer:
    """The result of a batch.

    `ttft_s` is until every prompt has its first token; `num_decoded` is the number of tokens after
    that.
    """

    ttft_s: float
    total_s: float
    num_tokens: int
    num_decoded: int
    first_tokens: list[int]


class Generator(Protocol):
    """A loaded model. It is greedy; every answer has exactly `new_tokens`.

    `facts` is what a reader of the figures should know.
    """

    @property
    def facts(self) -> Mapping[str, str]: ...

    def generate(self, prompts: list[list[int]], new_tokens: int) -> RunnerAnswer: ...


def finished(
    answers: Sequence[Sequence[int]], new_tokens: int, ttft_s: float, total_s: float, num_at_first: int
) -> RunnerAnswer:
    """Returns the answer. Raises ValueError if an answer is shorter or longer than requested."""
    lengths = {len(answer) for answer in answers}
    if lengths != {new_tokens}:
        raise ValueError(f"answers of {sorted(lengths)} tokens, expected {new_tokens}")
    num_tokens = len(answers) * new_tokens
    return RunnerAnswer(ttft_s, total_s, num_tokens, num_tokens - num_at_first, [int(answer[0]) for answer in answers])


def serve(load: Callable[[Settings], Generator], packages: Sequence[str]) -> None:
    """Loads, then answers until standard input ends.

    An exception is the last answer, as {"error": ...}, with exit code 1.
    """
    answers = _claim_standard_output()
    try:
        generator = load(Settings(**json.loads(sys.argv[1])))
        versions = {package: importlib.metadata.version(package) for package in packages}
        _say(answers, {"facts": versions | dict(generator.facts)})
        for line in sys.stdin:
            _say(answers, asdict(generator.generate(**json.loads(line))))
    except Exception as error:
        _say(answers, {"error": f"{type(error).__name__}: {error}"})
        raise


def _claim_standard_output() -> TextIO:
    """Reserves the pipe for answers.

    All other output, including native code's, goes to standard error.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers


def _say(answers: TextIO, message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()
