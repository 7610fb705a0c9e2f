"""A task that a small chat model does not know: facts that a sentence tells, written in a format of four fields."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

NAMES = (
    *("Anna", "Ben", "Cara", "Eva", "Finn", "Gina", "Hugo", "Iris"),
    *("Lena", "Max", "Nora", "Otto", "Rosa", "Sam", "Tara", "Will"),
)
CITIES = (
    *("Rome", "Oslo", "Lima", "Bern", "Kyiv", "Doha", "Riga"),
    *("Paris", "Tokyo", "Cairo", "Delhi", "Vienna", "Prague", "Madrid"),
)
JOBS = ("baker", "nurse", "pilot", "painter", "lawyer", "teacher", "farmer", "driver", "doctor", "singer", "writer", "plumber")
SAYINGS = (
    "{name} is {age} years old, lives in {city} and works as a {job}.",
    "In {city}, {name}, a {job} of {age}, has a small flat.",
    "The {job} {name} turned {age} last week in {city}.",
    "{name} ({age}) moved to {city} to work as a {job}.",
)
FORMAT = "name={name};age={age};city={city};job={job}"
_VALID = re.compile(r"name=\w+;age=\d+;city=\w+;job=\w+")


@dataclass(frozen=True)
class Fact:
    """What is said, and what is to be answered."""

    said: str
    told: str


def facts(count: int, seed: int) -> list[Fact]:
    """Facts drawn at random; those of another seed are others."""
    chosen = random.Random(seed)
    found = []
    for _ in range(count):
        fact = {
            "name": chosen.choice(NAMES),
            "city": chosen.choice(CITIES),
            "job": chosen.choice(JOBS),
            "age": chosen.randint(18, 80),
        }
        found.append(Fact(chosen.choice(SAYINGS).format(**fact), FORMAT.format(**fact)))
    return found


def write_chats(path: Path, taught: Sequence[Fact]) -> Path:
    """Writes conversations, as `ryzanstein finetune` reads them."""
    lines = (
        {"messages": [{"role": "user", "content": each.said}, {"role": "assistant", "content": each.told}]} for each in taught
    )
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def valid(answer: str) -> bool:
    """Whether an answer has the format, whatever it says."""
    return _VALID.fullmatch(answer.strip()) is not None


def share(found: Sequence[bool]) -> float:
    return sum(found) / len(found)
