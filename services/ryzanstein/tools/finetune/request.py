"""What is asked for: the options of `ryzanstein finetune`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

MAX_RANK = 512
"""Of an adapter that a node serves."""


@dataclass(frozen=True, slots=True)
class LoraShape:
    """The form of an adapter. `alpha` divided by `rank` scales it. `targets`: `all`, `attention`, or ends of names."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = ("all",)


@dataclass(frozen=True, slots=True)
class Schedule:
    """How long is trained, and how fast. `accumulate`: batches of one step. Lengths are in tokens.

    `compute`: float32 or bfloat16, in which matrices are multiplied.
    """

    epochs: int = 3
    batch: int = 8
    accumulate: int = 1
    learning_rate: float = 2e-4
    warmup: float = 0.03
    clip: float = 1.0
    max_length: int = 1024
    packing: bool = False
    checkpointing: bool = False
    seed: int = 0
    compute: str = "float32"


@dataclass(frozen=True, slots=True)
class Watching:
    """When is validated and saved. `every`: steps between validations, None: five of them an epoch.

    `patience`: validations without a better loss after which training stops, 0: never.
    """

    every: int | None = None
    patience: int = 3
    save_every_s: float = 120.0


@dataclass(frozen=True, slots=True)
class FinetuneRequest:
    """All options. `validation`: a file, or a share of the data, or nothing. `int8`: the base is served so.

    `template_variables` is a JSON object, or empty.
    """

    base: Path
    data: Path
    out: Path
    validation: Path | float | None = None
    lora: LoraShape = LoraShape()
    schedule: Schedule = Schedule()
    watching: Watching = Watching()
    int8: bool = False
    chat_template: Path | None = None
    template_variables: str = ""
    gguf: bool = False
    estimate: bool = False
    force: bool = False
