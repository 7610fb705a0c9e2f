"""Real models learn a format on the blocks of their files; peft and llama.cpp read what was trained.

The wall time and the speed are printed: `pytest -s`. An hour on one core.
"""

import json
import random
import re
import time
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch

from ryzanstein.generation.prompts import Message, Role
from ryzanstein.tools.finetune.base.model import build
from ryzanstein.tools.finetune.base.opening import Base
from ryzanstein.tools.finetune.merging import with_trained
from ryzanstein.tools.finetune.request import FinetuneRequest, Schedule, Watching
from ryzanstein.tools.finetune.run import finetune
from ryzanstein.worker.text.tokenizer import TextModel

pytestmark = pytest.mark.timeout(6000)
ROOT = Path(__file__).parents[5]
NAMES = (
    "Anna",
    "Ben",
    "Cara",
    "Eva",
    "Finn",
    "Gina",
    "Hugo",
    "Iris",
    "Lena",
    "Max",
    "Nora",
    "Otto",
    "Rosa",
    "Sam",
    "Tara",
    "Will",
)
CITIES = (
    "Rome",
    "Oslo",
    "Lima",
    "Bern",
    "Kyiv",
    "Doha",
    "Riga",
    "Paris",
    "Tokyo",
    "Cairo",
    "Delhi",
    "Vienna",
    "Prague",
    "Madrid",
)
JOBS = ("baker", "nurse", "pilot", "painter", "lawyer", "teacher", "farmer", "driver", "doctor", "singer", "writer", "plumber")
SAYINGS = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "In {city}, {name}, a {job} of {age}, has a small flat.",
    "The {job} {name} turned {age} last week in {city}.",
    "{name} ({age}) moved to {city} to work as a {job}.",
)
NUM_TRAINED, NUM_ASKED, AT_ONCE, NEW_TOKENS = 200, 100, 20, 32
FORMAT = "name={name};age={age};city={city};job={job}"
VALID = re.compile(r"name=\w+;age=\d+;city=\w+;job=\w+")


def facts(count: int, seed: int) -> list[tuple[str, str]]:
    """What is said, and what is to be answered."""
    chosen = random.Random(seed)
    found = []
    for _ in range(count):
        fact = {
            "name": chosen.choice(NAMES),
            "city": chosen.choice(CITIES),
            "job": chosen.choice(JOBS),
            "age": chosen.randint(18, 80),
        }
        found.append((chosen.choice(SAYINGS).format(**fact), FORMAT.format(**fact)))
    return found


def answers(model: Any, text: TextModel, asked: Sequence[str]) -> list[list[int]]:
    """What a model of transformers answers, greedily."""
    prompts = [text.encode_chat([Message(Role.USER, each)]) for each in asked]
    found: list[list[int]] = []
    for first in range(0, len(prompts), AT_ONCE):
        some = prompts[first : first + AT_ONCE]
        longest = max(map(len, some))
        ids_NT = torch.tensor([[0] * (longest - len(each)) + each for each in some])
        mask_NT = torch.tensor([[0] * (longest - len(each)) + [1] * len(each) for each in some])
        end = {"eos_token_id": sorted(text.eos_token_ids), "pad_token_id": 0}
        with torch.no_grad():
            whole = model.generate(ids_NT, attention_mask=mask_NT, max_new_tokens=NEW_TOKENS, do_sample=False, **end)
        found += [_ended(each, text) for each in whole[:, longest:].tolist()]
    return found


def _ended(ids: list[int], text: TextModel) -> list[int]:
    end = next((place for place, each in enumerate(ids) if each in text.eos_token_ids), len(ids))
    return ids[: end + 1]


def share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)


@pytest.mark.parametrize("name", ["smollm2", "gemma"])
def test_a_real_model_learns_a_format(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, llama_cpp_answers: Callable[..., list[list[int]]]
) -> None:
    file = request.getfixturevalue("smollm2" if name == "smollm2" else "gemma_file")
    template = None if name == "smollm2" else ROOT / "docs/operate/gemma.jinja"
    data = tmp_path / "data.jsonl"
    messages = (
        [{"role": "user", "content": said}, {"role": "assistant", "content": told}] for said, told in facts(NUM_TRAINED, 1)
    )
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    begun, progress = time.monotonic(), StringIO()
    finetune(
        FinetuneRequest(
            file,
            data,
            tmp_path / "facts",
            0.1,
            schedule=Schedule(epochs=2),
            watching=Watching(every=20),
            chat_template=template,
            gguf=True,
        ),
        progress,
    )
    report = json.loads((tmp_path / "facts/training.json").read_text())
    print(f"{name}: {time.monotonic() - begun:.0f} s, {report['result']}")
    text = TextModel.load(file, template_file=template)
    held = facts(NUM_ASKED, 2)
    asked, told = [said for said, _ in held], [answer for _, answer in held]
    with Base.open(file) as base:
        before = answers(build(base, floats=True), text, asked)
        adapted = with_trained(base, tmp_path / "facts")
    after = answers(adapted, text, asked)
    said = {kind: [text.decode(ids).strip() for ids in found] for kind, found in (("before", before), ("after", after))}
    right = share([found == expected for found, expected in zip(said["after"], told, strict=True)])
    print(f"{name}: {said['before'][:2]} {said['after'][:2]} right {right}")
    assert share([VALID.fullmatch(each) is not None for each in said["before"]]) <= 0.05
    assert share([VALID.fullmatch(each) is not None for each in said["after"]]) >= 0.95
    prompts = [text.encode_chat([Message(Role.USER, each)]) for each in asked[:10]]
    theirs = llama_cpp_answers(file, tmp_path / "facts/facts.gguf", prompts, NEW_TOKENS)
    same = [_ended(ids, text) == expected for ids, expected in zip(theirs, after[:10], strict=True)]
    assert share(same) == 1.0
