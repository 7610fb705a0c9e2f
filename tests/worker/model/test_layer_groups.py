"""How layers are divided into groups that share blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ryzanstein.worker.architectures.registry import spec_of
from ryzanstein.worker.architectures.spec import DecoderSpec, LayerSpec
from ryzanstein.worker.cache.layer_groups import LayerGroups, layer_groups

LLAMA = spec_of(
    {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 256,
        "max_position_embeddings": 32768,
        "rms_norm_eps": 1e-6,
    }
)


def with_windows(*windows: int | None) -> DecoderSpec:
    return replace(LLAMA, layers=tuple(LayerSpec(window=window, rotary=0) for window in windows))


def check(found: LayerGroups, windows: tuple[int | None, ...]) -> None:
    """Each layer has a place of its own, in a group of its extent."""
    assert len(set(zip(found.groups, found.planes, strict=True))) == len(windows)
    assert [found.windows[group] for group in found.groups] == list(windows)
    assert max(found.planes) < found.num_planes


def test_layers_of_one_kind_are_one_group() -> None:
    for window in (None, 4096):
        found = layer_groups(with_windows(*[window] * 7))
        assert (found.windows, found.num_planes) == ((window,), 7)
        check(found, (window,) * 7)


def test_gemma_3_has_a_group_that_reads_all_and_five_with_windows() -> None:
    windows = ((512,) * 5 + (None,)) * 3
    found = layer_groups(with_windows(*windows))
    assert (found.windows, found.num_planes) == ((None, *[512] * 5), 3)
    check(found, windows)


@pytest.mark.parametrize(("num_whole", "num_windowed"), [(4, 22), (5, 28), (8, 54), (1, 1), (1, 30), (13, 13)])
def test_padding_wastes_at_most_a_twentieth_of_a_long_sequence(num_whole: int, num_windowed: int) -> None:
    windows = (None,) * num_whole + (1024,) * num_windowed
    found = layer_groups(with_windows(*windows))
    check(found, windows)
    needed = num_whole * 32768 + num_windowed * 1024
    kept = found.num_planes * sum(window or 32768 for window in found.windows)
    assert needed <= kept <= 1.05 * needed
    larger = found.num_planes + 1  # ... and a larger group would waste more, or there are no more layers of a kind
    wasted = sum(-(-count // larger) * larger * size for count, size in ((num_whole, 32768), (num_windowed, 1024)))
    assert wasted > 1.05 * needed or larger > max(num_whole, num_windowed)


def test_a_window_of_the_whole_context_is_none() -> None:
    found = layer_groups(with_windows(32768, None, 40000))
    assert (found.windows, found.num_planes) == ((None,), 3)


def test_several_windows_are_several_kinds() -> None:
    windows = (None, 512, 1024, 512, None, 1024)
    found = layer_groups(with_windows(*windows))
    check(found, windows)
    assert (found.windows, found.num_planes) == ((None, 512, 1024), 2)
