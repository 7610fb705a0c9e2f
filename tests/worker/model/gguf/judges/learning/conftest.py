"""Real models that have learned a format on the blocks of their files, each trained once, and what clusters of them answer."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import openai
import pytest
import torch
from tests.worker.model.gguf.judges.learning.facts import facts, write_chats

from ryzanstein.cli.processes.cluster import ClusterSpec, LocalCluster
from ryzanstein.tools.finetune.request import FinetuneRequest, Schedule, Watching
from ryzanstein.tools.finetune.run import finetune
from ryzanstein.tools.finetune.training.precision import fastest
from ryzanstein.worker.text.tokenizer import TextModel

ROOT = Path(__file__).parents[6]
NUM_TAUGHT, NUM_ASKED, NEW_TOKENS = 120, 100, 32
SCHEDULE = Schedule(epochs=2, batch=8, learning_rate=5e-4)
ADAPTER = "facts"
SOURCES = ("services/ryzanstein/tools/finetune", "services/ryzanstein/worker", "shared/ryzanstein/generation")


@dataclass(frozen=True)
class LearnedModel:
    """A GGUF file and the adapter that was trained on it. `template`: what the file lacks."""

    name: str
    file: Path
    template: Path | None
    adapter: Path

    @property
    def gguf(self) -> Path:
        """The adapter for llama.cpp."""
        return self.adapter / f"{self.adapter.name}.gguf"

    @property
    def text(self) -> TextModel:
        return TextModel.load(self.file, template_file=self.template)

    def spec(self, **changes: Any) -> ClusterSpec:
        """One node of one rank that serves the file."""
        flags = () if self.template is None else ("--chat-template", str(self.template))
        return replace(ClusterSpec(self.file, num_nodes=1, tp=1, worker_flags=flags), **changes)


@dataclass(frozen=True)
class Heard:
    """An answer to OpenAI's client. `likeliest` has log probabilities at the place of each token."""

    text: str
    tokens: list[str]
    likeliest: list[dict[str, float]]

    def off(self, other: Heard) -> float:
        """By how much the first token of another answer that differs was less likely here, in nat; 0 for the same answer."""
        if other.tokens == self.tokens:
            return 0.0
        place = next((n for n, pair in enumerate(zip(self.tokens, other.tokens, strict=False)) if len(set(pair)) == 2), None)
        assert place is not None, "one of them is only a part of the other"
        there = self.likeliest[place]
        return there[self.tokens[place]] - there.get(other.tokens[place], -math.inf)


class ServedModel:
    """A running cluster, the command line, and OpenAI's client."""

    def __init__(self, cluster: LocalCluster) -> None:
        self.cluster = cluster
        self.openai = openai.OpenAI(base_url=f"{cluster.http_url}/v1", api_key="none", max_retries=0, timeout=300)
        self.base = self.openai.models.list().data[0].id

    def adapters(self, *words: object, code: int = 0) -> str:
        """`ryzanstein adapters ...`"""
        where = ("--orchestrator", self.cluster.orchestrator_address)
        command = (sys.executable, "-P", "-m", "ryzanstein.cli", "adapters", *map(str, words), *where)
        done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    def add(self, adapter: Path, name: str = ADAPTER, code: int = 0) -> str:
        return self.adapters("add", name, adapter, "--to", self.base, "--wait", "120", code=code)

    def ask(self, model: str, prompt: str) -> Heard:
        messages: list[Any] = [{"role": "user", "content": prompt}]
        given: dict[str, Any] = {"temperature": 0, "max_tokens": NEW_TOKENS, "logprobs": True, "top_logprobs": 5}
        (choice,) = self.openai.chat.completions.create(model=model, messages=messages, **given).choices
        assert choice.logprobs is not None
        tokens = choice.logprobs.content or []
        likeliest = [{top.token: top.logprob for top in each.top_logprobs} for each in tokens]
        return Heard(str(choice.message.content), [each.token for each in tokens], likeliest)

    def ask_all(self, asked: Sequence[tuple[str, str]]) -> list[Heard]:
        """Asks models, all at about the same time; the node puts them into the same batches."""
        with ThreadPoolExecutor(16) as pool:
            return list(pool.map(lambda each: self.ask(*each), asked))


@contextmanager
def served(spec: ClusterSpec) -> Iterator[ServedModel]:
    with LocalCluster(spec) as cluster:
        yield ServedModel(cluster)


@pytest.fixture(scope="session", params=["smollm2", "gemma"])
def learned(request: pytest.FixtureRequest) -> LearnedModel:
    """A model that has learned the facts' format."""
    file = request.getfixturevalue("smollm2" if request.param == "smollm2" else "gemma_file")
    template = None if request.param == "smollm2" else ROOT / "docs/operate/gemma.jinja"
    return LearnedModel(request.param, file, template, trained(request.param, file, template))


def trained(name: str, file: Path, template: Path | None, **changes: Any) -> Path:
    """Trains an adapter with the product's own function, or returns one that the same sources made of the same data.

    A training that was interrupted goes on.
    """
    request = FinetuneRequest(
        file,
        Path("data.jsonl"),
        Path(ADAPTER),
        0.1,
        schedule=replace(SCHEDULE, compute=fastest()),
        watching=Watching(every=10),
        chat_template=template,
        gguf=True,
    )
    request = replace(request, **changes)
    folder = ROOT / "build/learned" / f"{name}-{_key(request)}"
    for left in folder.parent.glob(f"{name}-*"):
        if left != folder:
            shutil.rmtree(left)
    folder.mkdir(parents=True, exist_ok=True)
    out, data = folder / ADAPTER, write_chats(folder / "data.jsonl", facts(NUM_TAUGHT, 1))
    if not out.exists():
        begun, cpu = time.monotonic(), time.process_time()
        with (folder / "log").open("a") as log, warnings.catch_warnings():
            warnings.simplefilter("ignore")
            finetune(replace(request, data=data, out=out), log)
        print(f"{name}: trained in {time.monotonic() - begun:.0f} s, {time.process_time() - cpu:.0f} s of a core")
    print(f"{name}: {json.loads((out / 'training.json').read_text())['result']}")
    return out


def _key(request: FinetuneRequest) -> str:
    """Of all that a training depends on."""
    whole = hashlib.sha256()
    for folder in SOURCES:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".c", ".h"):
                whole.update(path.read_bytes())
    for path in (request.base, *filter(None, [request.chat_template]), Path(__file__).with_name("facts.py")):
        whole.update(path.read_bytes())
    options = {**asdict(request), "base": "", "chat_template": ""}
    versions = [version(each) for each in ("torch", "transformers", "peft", "tokenizers")]
    whole.update(json.dumps([options, NUM_TAUGHT, versions, torch.get_num_threads()], default=str).encode())
    return whole.hexdigest()[:16]


@dataclass(frozen=True)
class Talk:
    """What a cluster of one rank answered to the same questions: without an adapter, and with it in the same batches."""

    asked: list[str]
    told: list[str]
    alone: list[Heard]
    beside: list[Heard]
    adapted: list[Heard]


@pytest.fixture(scope="session")
def talk(learned: LearnedModel) -> Talk:
    held = facts(NUM_ASKED, 2)
    asked = [each.said for each in held]
    with served(learned.spec()) as model:
        alone = model.ask_all([(model.base, each) for each in asked])
        assert "ready on 1 of 1 nodes" in model.add(learned.adapter)
        found = model.ask_all([(name, each) for each in asked for name in (model.base, ADAPTER)])
    return Talk(asked, [each.told for each in held], alone, found[::2], found[1::2])


@pytest.fixture(scope="session")
def serve() -> Callable[[ClusterSpec], Any]:
    """Serves a model while a block runs."""
    return served


@pytest.fixture(scope="session", autouse=True)
def _offline() -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
