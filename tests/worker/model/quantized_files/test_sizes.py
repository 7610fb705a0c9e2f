"""What a quantized directory is said to need is what its ranks keep, or a little more."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ryzanstein.worker.checkpoints.quantized_files.sizes import KEPT, unpacked_entries
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.json_files import read_object
from ryzanstein.worker.model.loading import slice_bytes
from ryzanstein.worker.settings.options import RunnerOptions

COMPRESSED = "compressed-tensors"
RECIPES: dict[str, dict[str, Any]] = {
    "gptq": {"method": "gptq"},
    "gptq of 3 bits": {"method": "gptq", "bits": 3, "more": {"checkpoint_format": "gptq_v2"}},
    "gptq with groups of 16": {"method": "gptq", "group": 16},
    "gptq with act-order": {"method": "gptq", "act_order": True},
    "awq": {"method": "awq", "symmetric": False},
    "W4A16": {"method": COMPRESSED, "more": {"format": "pack-quantized"}},
    "W8A8": {"method": COMPRESSED, "more": {"format": "int-quantized"}, "bits": 8, "group": None},
    "W8 of narrow blocks": {
        "method": COMPRESSED,
        "more": {"format": "int-quantized", "strategy": "block", "block_structure": [64, 16]},
        "bits": 8,
        "group": 16,
        "symmetric": False,
    },
    "fp8": {"method": "fp8", "more": {"weight_block_size": [128, 128]}},
    "bitnet that divides": {"method": "bitnet", "more": {"linear_class": "bitlinear"}},
    "bitnet": {"method": "bitnet", "more": {"linear_class": "autobitlinear"}},
}


def sizes(directory: Path) -> tuple[int, int]:
    """Returns the bytes that are estimated, and those that a rank keeps."""
    entries = unpacked_entries(read_object(directory / "config.json"), read_tensor_files(directory))
    estimate = sum(entry.num_bytes if entry.dtype == KEPT else 4 * math.prod(entry.shape) for entry in entries.values())
    return estimate, slice_bytes(directory, TensorParallel(0, 1, LocalCollectives()), RunnerOptions(num_blocks=4))


@pytest.mark.parametrize("name", list(RECIPES))
def test_the_estimate_is_not_below_what_is_kept(name: str, published: Callable[..., Any], recipe: Callable[..., Any]) -> None:
    made = published(recipe(**RECIPES[name]))
    config, stored = read_object(made.directory / "config.json"), read_tensor_files(made.directory)
    entries = unpacked_entries(config, stored)
    assert {entry.name: entry.shape for entry in entries.values()} == {
        entry.name: entry.shape for entry in read_tensor_files(made.floats).values()
    }
    estimate, kept = sizes(made.directory)
    assert kept <= estimate < 1.5 * kept


def test_a_directory_of_floats_is_left_as_it_is(published: Callable[..., Any], recipe: Callable[..., Any]) -> None:
    made = published(recipe("gptq"))
    stored = read_tensor_files(made.floats)
    assert unpacked_entries(read_object(made.floats / "config.json"), stored) is stored
