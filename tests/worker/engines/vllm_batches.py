"""vLLM's batches without vLLM: what its model runners do with a logits processor."""

from __future__ import annotations

import importlib
import random
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from ryzanstein.worker.engines.asking import AskedRow, packed

VOCABULARY = 211


class MoveDirectionality(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class BatchUpdate:
    batch_size: int
    removed: tuple = ()
    added: tuple = ()
    moved: tuple = ()


class LogitsProcessor:
    """As vLLM 0.32 has it for its first model runner."""


@pytest.fixture
def sampler_class(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """The class, on modules that have the names that it imports from vLLM."""
    vllm, interface = ModuleType("vllm"), ModuleType("vllm.v1.sample.logits_processor")
    vllm.SamplingParams = SimpleNamespace
    interface.BatchUpdate, interface.LogitsProcessor, interface.MoveDirectionality = (
        BatchUpdate,
        LogitsProcessor,
        MoveDirectionality,
    )
    for name in ("vllm.v1", "vllm.v1.sample"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.v1.sample.logits_processor", interface)
    name = "ryzanstein.worker.engines.vllm.inside.sampler"
    yield importlib.import_module(name).Sampler
    del sys.modules[name]


def logits_after(tokens: list[int]) -> torch.Tensor:
    """What the model says after these tokens: on every node, in any batch the same."""
    generator = torch.Generator().manual_seed(hash(tuple(tokens)) % 2**31)
    return torch.randn(VOCABULARY, generator=generator) * 3


def argued(row: AskedRow) -> SimpleNamespace:
    return SimpleNamespace(extra_args=packed(row))


class Batch:
    """vLLM's batch of the first model runner: requests leave, others take their places, then the last ones fill the gaps."""

    def __init__(self, sampler) -> None:
        self.sampler = sampler
        self.places: list[tuple[list[int], list[int]] | None] = []
        self.removed, self.added, self.moved = [], [], []

    def add(self, params, token_ids: list[int]) -> list[int]:
        output: list[int] = []
        if None not in self.places:
            self.places.append(None)
        place = self.places.index(None)
        self.places[place] = (token_ids, output)
        self.added.append((place, params, token_ids, output))
        return output

    def remove(self, output: list[int]) -> None:
        place = next(i for i, each in enumerate(self.places) if each is not None and each[1] is output)
        self.removed.append(place)
        self.places[place] = None

    def swap(self, one: int, other: int) -> None:
        self.places[one], self.places[other] = self.places[other], self.places[one]
        self.moved.append((one, other, MoveDirectionality.SWAP))

    def condense(self) -> None:
        while None in self.places:
            last = self.places.pop()
            if last is not None:
                place = self.places.index(None)
                self.places[place] = last
                self.moved.append((len(self.places), place, MoveDirectionality.UNIDIRECTIONAL))

    def step(self, swaps: random.Random | None = None) -> None:
        self.condense()
        if swaps is not None and len(self.places) > 1 and swaps.random() < 0.3:
            self.swap(*swaps.sample(range(len(self.places)), 2))
        changed = self.removed or self.added or self.moved
        update = BatchUpdate(len(self.places), tuple(self.removed), tuple(self.added), tuple(self.moved)) if changed else None
        self.removed, self.added, self.moved = [], [], []
        self.sampler.update_state(update)
        if not self.places:
            return
        logits = self.sampler.apply(torch.stack([logits_after([*ids, *output]) for ids, output in self.places]))
        for (_, output), token in zip(self.places, logits.argmax(dim=1).tolist(), strict=True):
            output.append(token)


class Slots:
    """vLLM's second model runner: slots, rows in any order, prompts in pieces whose samples are thrown away.

    As there, what a request brings is written to the device after `add_request`, just before the step, and lengths are padded
    to the batch of a CUDA graph.
    """

    def __init__(self, sampler_class, num_slots: int = 4, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype
        self.prompt_len = SimpleNamespace(np=torch.zeros(num_slots, dtype=torch.int32).numpy())
        self.prefill_len = SimpleNamespace(np=torch.zeros(num_slots, dtype=torch.int32).numpy())
        self.tokens = SimpleNamespace(gpu=torch.zeros(num_slots, 128, dtype=torch.int64))
        state = SimpleNamespace(prompt_len=self.prompt_len, prefill_len=self.prefill_len, all_token_ids=self.tokens)
        self.sampler = sampler_class(SimpleNamespace(), state)
        self.length: dict[int, int] = {}
        self._staged: dict[int, list[int]] = {}

    def add(self, slot: int, params, token_ids: list[int], output: list[int] = ()) -> bool:
        """`output`: what was generated before the request was preempted."""
        self.prompt_len.np[slot] = len(token_ids)
        self.prefill_len.np[slot] = self.length[slot] = len(token_ids) + len(output)
        self._staged[slot] = [*token_ids, *output]
        return self.sampler.add_request(slot, params)

    def step(self, slots: list[int], partly: dict[int, int]) -> None:
        """Feeds these slots; of those that are `partly` fed, only the first so many tokens."""
        for slot, token_ids in self._staged.items():
            self.tokens.gpu[slot, : len(token_ids)] = torch.tensor(token_ids)
        self._staged = {}
        self.sampler.apply_staged_writes()
        ends = [partly.get(slot, self.length[slot]) for slot in slots]
        texts = [self.tokens.gpu[slot, :end].tolist() for slot, end in zip(slots, ends, strict=True)]
        ctx = SimpleNamespace(
            idx_mapping_np=np.array(slots, np.int32), seq_lens_upper_bound_np=np.array([*ends, 0, 0], np.int32)
        )
        logits = self.sampler.apply(torch.stack([logits_after(text) for text in texts]).to(self._dtype), ctx)
        for slot, token in zip(slots, logits.argmax(dim=1).tolist(), strict=True):
            if slot not in partly:
                self.tokens.gpu[slot, self.length[slot]] = token
                self.length[slot] += 1
