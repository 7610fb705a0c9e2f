"""A model that keeps a state, in an engine of this process: how many slots there are, and that no bit depends on reuse."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.worker.model.lone_engine import LoneRank

from ryzanstein.generation.request import SamplingParams
from ryzanstein.worker.architectures.mixers import DeltaSpec
from ryzanstein.worker.architectures.registry import read_spec
from ryzanstein.worker.cache.sizes import CacheRequest, cache_size
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.engine import Engine
from ryzanstein.worker.engine.extents import EngineSettings
from ryzanstein.worker.engine.messages import SubmitGroup
from ryzanstein.worker.refusal import ModelRefused

OPTIONS = {"block_size": 16, "num_blocks": 60, "max_sequences": 4, "max_tokens_per_step": 64}


class Served:
    """An engine, and what it said."""

    def __init__(self, loaded: Any, budget: int = 64) -> None:
        self.rank, self.loaded = LoneRank(loaded), loaded
        sizes = (loaded.num_blocks, 16, loaded.max_sequences, budget)
        self.engine = Engine(EngineSettings(*sizes, windows=loaded.extents.windows, num_states=loaded.num_states), self.rank)
        self.said: dict[tuple[int, int], list[Any]] = {}

    def ask(self, group: int, prompt: list[int], num_tokens: int = 30, **sampling: Any) -> int:
        """Returns how many tokens were fed until the end of the group."""
        before, params = self.rank.num_fed, SamplingParams(**{"temperature": 0.0, "logprobs": 0, **sampling})
        choices = range(params.n)
        self.engine.submit(SubmitGroup(group, prompt, params, num_tokens, [], [[] for _ in choices], [False for _ in choices]))
        while self.engine.has_work:
            events = self.engine.step()
            assert not events.failed
            for row, key in enumerate(zip(events.groups, events.choices, strict=True)):
                self.said.setdefault(key, []).append((events.token_ids[row], events.logprobs[row][0]))
        return self.rank.num_fed - before

    def tokens(self, group: int, choice: int = 0) -> list[int]:
        return [token for token, _ in self.said[group, choice]]


@pytest.fixture
def load(model_dirs: Callable[[str], Path], runner: Callable[..., Any]) -> Callable[..., Any]:
    return lambda name="qwen3_5_text", **given: runner(model_dirs(name), **{**OPTIONS, "num_states": None, **given})


def prompt_of(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 251) for _ in range(length)]


@pytest.mark.parametrize(
    "name",
    [
        "qwen3_5_text",
        "qwen3_next",
        "granitemoehybrid states",
        "granitemoehybrid states of groups",
        "falcon_h1 states",
        "nemotron_h states",
    ],
)
def test_what_is_resumed_has_the_bits_of_what_is_computed(load: Callable[..., Any], name: str) -> None:
    loaded, prompt = load(name), prompt_of(90, 1)
    served = Served(loaded)
    assert served.ask(1, prompt) == 90 + 29
    turn = [*prompt, *served.tokens(1), *prompt_of(9, 2)]
    assert served.ask(2, turn) <= 9 + 32 + 29
    assert served.ask(3, [*prompt[:80], *prompt_of(7, 3)]) <= 7 + 16 + 29
    alone = Served(loaded, budget=7)
    for group, ids in ((2, turn), (3, [*prompt[:80], *prompt_of(7, 3)])):
        alone.engine = Engine(EngineSettings(60, 16, 4, 7 + group, num_states=12), alone.rank)
        assert alone.ask(group, ids) == len(ids) + 29
        assert alone.said[group, 0] == served.said[group, 0]


def test_choices_that_begin_with_one_state_are_those_of_requests_alone(load: Callable[..., Any]) -> None:
    loaded, prompt = load(), prompt_of(70, 4)
    many, alone = Served(loaded), Served(loaded)
    sampling = {"temperature": 1.0, "seed": 3}
    assert many.ask(1, prompt, n=4, **sampling) <= 70 + 3 * 32 + 4 * 29
    alone.ask(1, prompt, **sampling)
    assert many.said[1, 0] == alone.said[1, 0]
    assert len({tuple(many.tokens(1, choice)) for choice in range(4)}) == 4


def test_prompts_that_are_scored_are_scored_as_a_whole(load: Callable[..., Any]) -> None:
    """What scores a prompt is computed again: no state is resumed from that is later than its first token."""
    served, prompt = Served(load()), prompt_of(60, 5)
    served.ask(1, prompt)
    assert served.ask(2, prompt, num_tokens=1, prompt_logprobs=0) == 60


def test_slots_bound_how_many_sequences_run(load: Callable[..., Any]) -> None:
    loaded = load(num_states=7)
    assert (loaded.num_states, loaded.max_sequences) == (7, 2)
    assert loaded.page_bytes == 0, "pages are of no use elsewhere without a state"
    plenty = load()
    assert (plenty.num_states, plenty.max_sequences) == (12, 4)
    assert plenty.kv_bytes == plenty.num_blocks * plenty.block_bytes + 12 * plenty.state_bytes


def test_without_a_budget_states_of_eight_sequences_fit(model_dirs: Callable[[str], Path]) -> None:
    """Of a model of 9B a state has 50 MiB."""
    spec = read_spec(model_dirs("qwen3_5_text"))
    wide = DeltaSpec(16, 32, 128, 128, 4)
    layers = [replace(layer, state=None if layer.state is None else wide) for layer in spec.layers]
    large = replace(spec, layers=tuple(layers * (24 // len(spec.states))))
    request = CacheRequest(None, None, 16, 32, 512, 4)
    size = cache_size(large, TensorParallel(0, 1, LocalCollectives()), request)
    assert size.state_bytes > 48 << 20
    assert size.max_sequences == 8
    assert size.num_blocks * size.block_bytes <= 1 << 29
    halved = cache_size(large, TensorParallel(0, 1, LocalCollectives()), replace(request, kv_bytes=1 << 30))
    assert halved.max_sequences == 3


def test_half_of_the_cache_is_for_states(load: Callable[..., Any]) -> None:
    state_bytes = load().state_bytes
    loaded = load(num_blocks=None, kv_bytes=14 * state_bytes)
    assert (loaded.num_states, loaded.max_sequences) == (7, 2)
    assert 13 * state_bytes < loaded.kv_bytes <= 14 * state_bytes
    with pytest.raises(ModelRefused, match=r"kv_bytes must be at least \d+, or tuning.kv_states set"):
        load(num_blocks=None, kv_bytes=5 * state_bytes)
    with pytest.raises(ModelRefused, match=r"2 slots for states \(tuning.kv_states\) must be at least 3"):
        load(num_states=2)


def test_a_layer_that_keeps_a_state_follows_no_rule_of_sparse_attention(load: Callable[..., Any]) -> None:
    assert load(sparse_attention="window=16,sinks=4").sparse_attention
    with pytest.raises(ModelRefused, match="layer 0 keeps a state"):
        load(sparse_attention="window=16,sinks=4,layers=0")
    with pytest.raises(ModelRefused, match="layer 1 keeps no keys"):
        load("nemotron_h states", sparse_attention="window=16,sinks=4,layers=1")
