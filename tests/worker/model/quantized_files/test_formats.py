"""Published formats, served: the numbers are those of the format, in floats and in blocks, on one rank and on two."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.rank_processes import answers_of_ranks
from torch import Tensor

from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.loading import open_model, slice_bytes
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.products.blocks import pack, packed_bytes
from ryzanstein.worker.settings.options import RunnerOptions

IDS = torch.randint(3, 320, (41,), generator=torch.Generator().manual_seed(5)).tolist()
NEAR = 0.1  # random layers multiply an error of less than a hundredth; what is wrong differs by more than 1
COMPRESSED = "compressed-tensors"
PACKED, INT, FLOAT = ({"format": f"{name}-quantized"} for name in ("pack", "int", "float"))
BLOCK = [128, 128]
GPTQ_V2 = {"checkpoint_format": "gptq_v2"}
QUERY, DOWN = "model.layers.0.self_attn.q_proj.weight", "model.layers.1.mlp.down_proj.weight"

RECIPES: dict[str, tuple[dict[str, Any], str | None]] = {
    "gptq": ({"method": "gptq"}, "G4_64"),
    "gptq of 2 bits": ({"method": "gptq", "bits": 2, "symmetric": False}, "G4_64"),
    "gptq_v2 of 3 bits": ({"method": "gptq", "bits": 3, "group": 32, "symmetric": False, "more": GPTQ_V2}, "G4_32"),
    "gptq of 8 bits": ({"method": "gptq", "bits": 8, "group": None, "symmetric": False}, "G8_128"),
    "gptq with zero points": ({"method": "gptq", "symmetric": False, "group": 128}, "G4_128"),
    "gptq_v2": ({"method": "gptq", "symmetric": False, "more": GPTQ_V2}, "G4_64"),
    "gptq with act-order": ({"method": "gptq", "symmetric": False, "act_order": True}, None),
    "gptq with groups of 16": ({"method": "gptq", "group": 16}, None),
    "awq": ({"method": "awq", "symmetric": False, "group": 128}, "G4_128"),
    "awq with one group": ({"method": "awq", "symmetric": False, "group": None}, "G4_128"),
    "W4A16": ({"method": COMPRESSED, "more": PACKED}, "G4_64"),
    "W4A16 with zero points": (
        {"method": COMPRESSED, "more": PACKED, "symmetric": False, "scale_dtype": torch.bfloat16},
        "G4_64",
    ),
    "3 bits": ({"method": COMPRESSED, "more": PACKED, "symmetric": False, "bits": 3, "group": 32}, "G4_32"),
    "W8A16": ({"method": COMPRESSED, "more": PACKED, "bits": 8, "group": None}, "G8_128"),
    "W8A8": ({"method": COMPRESSED, "more": INT, "bits": 8, "group": None, "scale_dtype": torch.bfloat16}, "G8_128"),
    "W8A8 with zero points": ({"method": COMPRESSED, "more": INT, "bits": 8, "symmetric": False}, "G8_64"),
    "W8 of blocks with zero points": (
        {
            "method": COMPRESSED,
            "more": INT | {"strategy": "block", "block_structure": [96, 64]},
            "bits": 8,
            "symmetric": False,
        },
        "G8_64",
    ),
    "W4 of blocks with zero points": (
        {"method": COMPRESSED, "more": PACKED | {"strategy": "block", "block_structure": [96, 64]}, "symmetric": False},
        "G4_64",
    ),
    "scales that are no halves": ({"method": COMPRESSED, "more": INT, "bits": 8, "scale_dtype": torch.float32}, None),
    "FP8 of channels": ({"method": COMPRESSED, "more": FLOAT | {"type": "float", "strategy": "channel"}, "bits": 8}, None),
    "FP8 of tensors": ({"method": COMPRESSED, "more": FLOAT | {"type": "float", "strategy": "tensor"}, "bits": 8}, None),
    "FP8 of blocks": (
        {"method": COMPRESSED, "more": FLOAT | {"type": "float", "strategy": "block", "block_structure": BLOCK}, "bits": 8},
        None,
    ),
    "fp8 of blocks": ({"method": "fp8", "scale_dtype": torch.float32, "more": {"weight_block_size": BLOCK}}, None),
    "fp8 of tensors": ({"method": "fp8", "scale_dtype": torch.float32}, None),
    "bitnet": ({"method": "bitnet", "more": {"linear_class": "autobitlinear"}}, "TQ2_0"),
    "bitnet that divides": ({"method": "bitnet", "more": {"linear_class": "bitlinear"}, "scale_dtype": torch.float32}, None),
}
TWO_RANKS = ("gptq_v2 of 3 bits", "gptq with act-order", "awq", "W4A16 with zero points", "W8A8", "fp8 of blocks", "bitnet")
IN_BLOCKS = [name for name, (_, kind) in RECIPES.items() if kind is not None]


@pytest.fixture(scope="session")
def model(published: Callable[..., Any], recipe: Callable[..., Any]) -> Callable[..., Any]:
    """A quantized model by the name of its format."""
    return lambda name, model_type="llama": published(recipe(**RECIPES[name][0]), model_type)


def plan(first: int, count: int) -> StepPlan:
    return StepPlan(1, IDS[first : first + count], [count], [first], [list(range(12))], [0], full_logits=True)


def logits(runner: ModelRunner) -> Tensor:
    found = [runner.hidden_logits(step) for step in (plan(0, 40), plan(40, 1))]
    return torch.cat([each for each in found if each is not None])


@pytest.mark.parametrize("name", list(RECIPES))
def test_floats_are_the_numbers_of_the_format(name: str, model: Callable[..., Any], runner: Callable[..., Any]) -> None:
    """To the bit: without kernels everything becomes floats."""
    made = model(name)
    found, expected = (logits(runner(path, kernels="torch")) for path in (made.directory, made.floats))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", list(RECIPES))
def test_matrices_stay_in_blocks_where_these_have_their_numbers(
    name: str, model: Callable[..., Any], kernels: NativeKernels
) -> None:
    """All numbers of a block are those of the file, and so are those of any slice."""
    made, (_, kind) = model(name), RECIPES[name]
    _, files = open_model(made.directory)
    _, floats = open_model(made.floats)
    kinds = {weight: None if (blocks := files.blocks(weight)) is None else blocks.kind.name for weight in (QUERY, DOWN)}
    files.close()
    assert kinds == {QUERY: kind, DOWN: "G4_128" if kind == "TQ2_0" else kind}
    for weight, shape in ((QUERY, (256, 256)), (DOWN, (256, 384))) if kind is not None else ():
        blocks = files.blocks(weight)
        assert blocks is not None
        with closing(floats):
            floats.read(weight, shape, expected := torch.zeros(shape))
        first, count = 96, shape[1] - 96
        for found, numbers in (
            (blocks, expected),
            (blocks.rows(40, 70), expected[40:110]),
            (blocks.columns(first, count), expected[:, first:]),
        ):
            memory = torch.zeros(packed_bytes(kernels.blocks, found.shape, found.kind), dtype=torch.uint8)
            assert torch.equal(pack(kernels.blocks, [found], len(numbers), memory).lookup(torch.arange(len(numbers))), numbers)
        assert blocks.columns(16, 64) is None
    files.close()


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_blocks_give_what_their_numbers_give(name: str, model: Callable[..., Any], runner: Callable[..., Any]) -> None:
    """But for the rounding of rows."""
    made = model(name)
    found, expected = (logits(runner(path)) for path in (made.directory, made.floats))
    assert 0 < (found - expected).norm() < NEAR * expected.norm()


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text"])
@pytest.mark.parametrize("name", ["gptq with zero points", "awq", "W8A8"])
def test_other_architectures(name: str, model_type: str, model: Callable[..., Any], runner: Callable[..., Any]) -> None:
    """Biases, norms of queries and tied heads are read as they are."""
    made = model(name, model_type)
    found, expected = (logits(runner(path, kernels="torch")) for path in (made.directory, made.floats))
    assert torch.equal(found, expected)
    assert (logits(runner(made.directory)) - expected).norm() < NEAR * expected.norm()


def test_the_floats_are_those_of_transformers(
    model: Callable[..., Any], runner: Callable[..., Any], reference: Callable[[Path], Any]
) -> None:
    """What is compared with above is itself right."""
    made = model("awq", "gemma3_text")
    torch.testing.assert_close(
        logits(runner(made.directory, kernels="torch")), reference(made.floats).logits(IDS)[[39, 40]], rtol=1e-4, atol=1e-4
    )


@pytest.mark.parametrize("quantization", ["fp16", "int8"])
@pytest.mark.parametrize("name", ["gptq with act-order", "awq", "fp8 of blocks"])
def test_matrices_are_quantized_again_where_that_is_asked_for(
    name: str, quantization: str, model: Callable[..., Any], runner: Callable[..., Any]
) -> None:
    made = model(name)
    found, expected = (logits(runner(path, quantization=quantization)) for path in (made.directory, made.floats))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", IN_BLOCKS)
def test_weights_take_the_bytes_of_their_blocks(name: str, model: Callable[..., Any]) -> None:
    """Embedding and head stay floats."""
    path, tp = model(name).directory, TensorParallel(0, 1, LocalCollectives())
    kept, floats = (slice_bytes(path, tp, RunnerOptions(num_blocks=4, kernels=kernels)) for kernels in ("auto", "torch"))
    numbers = 2 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 384)
    assert floats - kept > numbers * (4 - (1.5 if RECIPES[name][1].startswith("G8") else 0.8))  # type: ignore[union-attr]


def test_every_kind_of_block_is_one_of_the_kernels() -> None:
    assert {kind for _, kind in RECIPES.values() if kind is not None} <= BLOCKS.keys()


@pytest.mark.distributed
def test_two_ranks_give_what_one_gives(model: Callable[..., Any], runner: Callable[..., Any], tmp_path: Path) -> None:
    """Half of the MLP's 384 columns are 192, no whole number of groups of 128: a smaller block has them, or floats."""
    options = {"num_blocks": 64, "block_size": 4, "num_threads": 1}
    paths = [model(name).directory for name in TWO_RANKS]
    jobs = [(path, options, [plan(0, 40), plan(40, 1)]) for path in paths]
    for path, answer in zip(paths, answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"], strict=True):
        expected = logits(runner(path))
        assert (torch.cat(answer["answers"]) - expected).norm() < NEAR * expected.norm()
