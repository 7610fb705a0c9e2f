"""Models served from their file: floats give the bits of a directory, blocks stay blocks, on one rank and on two."""

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.worker.model.gguf import test_architectures
from tests.worker.model.rank_processes import answers_of_ranks
from torch import Tensor

from ryzanstein.tools.convert.from_checkpoint import WRITTEN, to_file
from ryzanstein.worker.architectures.mixers import DeltaSpec
from ryzanstein.worker.checkpoints.checkpoint import MappedWeights
from ryzanstein.worker.collectives.local import LocalCollectives
from ryzanstein.worker.collectives.parallel import TensorParallel
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.model.gguf_files import open_gguf
from ryzanstein.worker.model.loading import load_model, slice_bytes
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.products.formats import WeightFormat
from ryzanstein.worker.refusal import ModelRefused
from ryzanstein.worker.settings.options import RunnerOptions

WIDE = {"hidden_size": 256, "intermediate_size": 768}
MODELS: dict[str, Any] = {
    "llama": WIDE,
    "qwen2": WIDE,
    "gemma3_text": {**WIDE, "head_dim": 64, "sliding_window": 16, "query_pre_attn_scalar": 64},
    "gpt2": {"hidden_size": 256, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 512, "n_inner": 768},
    "lfm2": {
        **WIDE,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "block_auto_adjust_ff_dim": False,
    },
    "granitemoehybrid": {
        **WIDE,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
        "num_local_experts": 0,
        "shared_intermediate_size": 768,
        "mamba_n_heads": 8,
        "mamba_d_state": 32,
    },
    "qwen3_5_text": {
        **WIDE,
        "head_dim": 64,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    # Each token uses all experts: rounding changes how much, not which.
    "qwen3_moe": {**WIDE, "num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 256, "norm_topk_prob": True},
}
OTHERS: dict[str, Any] = {
    "falcon": {"hidden_size": 256, "new_decoder_architecture": True, "num_kv_heads": 2},
    "stablelm": {**WIDE, "partial_rotary_factor": 0.5, "qk_layernorm": True},
    "deepseek_v3": {
        **WIDE,
        "num_key_value_heads": 4,
        "kv_lora_rank": 64,
        "q_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 32,
        "v_head_dim": 64,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "n_group": 1,
        "topk_group": 1,
        "first_k_dense_replace": 1,
    },
}
"""Those that are only read here, row by row and column by column."""
BLOCKS = ("q8_0", "q4_0", "q4_k", "q6_k")
CPU = torch.device("cpu")
NEAR = 0.1  # random layers multiply an error of less than a hundredth; what is wrong differs by more than 1
IDS = torch.randint(3, 320, (41,), generator=torch.Generator().manual_seed(5)).tolist()
Runner = Callable[..., ModelRunner]


def plan(first: int, count: int, table: int = 0) -> StepPlan:
    """Feeds so many tokens; a table has 12 blocks of 4."""
    tokens = IDS[first : first + count]
    return StepPlan(1, tokens, [count], [first], [list(range(12 * table, 12 * table + 12))], [0], full_logits=True)


def logits(runner: ModelRunner, *steps: StepPlan) -> Tensor:
    found = [runner.hidden_logits(step) for step in steps]
    return torch.cat([each for each in found if each is not None])


@pytest.fixture(scope="module")
def model_dir(tiny: Callable[..., Path]) -> Callable[[str], Path]:
    return cache(lambda name: tiny(name, **{**MODELS, **OTHERS}[name]))


@pytest.fixture(scope="module")
def to_file_of(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Writes a model's file of a type, once: `to_file_of("llama", "q8_0")`."""

    @cache
    def write(model: str, kind: str) -> Path:
        path = tmp_path_factory.mktemp("file") / f"{model}.gguf"
        to_file(model_dir(model), path, WRITTEN[kind], io.StringIO())
        return path

    return write


def _same(model: str, found: Tensor, expected: Tensor) -> bool:
    """Returns whether bits are equal; of models whose file has heads in another order or other decays, whether numbers are."""
    if model not in ("qwen3_5_text", "granitemoehybrid"):
        return torch.equal(found, expected)
    return bool((found - expected).norm() < 1e-5 * expected.norm())


@pytest.mark.parametrize("model", MODELS)
def test_floats_give_the_bits_of_the_directory(
    model: str, model_dir: Callable[[str], Path], to_file_of: Callable[[str, str], Path], runner: Runner
) -> None:
    expected = logits(runner(model_dir(model)), plan(0, 40), plan(40, 1))
    assert _same(model, logits(runner(to_file_of(model, "f32")), plan(0, 40), plan(40, 1)), expected)


@pytest.mark.parametrize("name", test_architectures.MODELS)
@pytest.mark.long
def test_every_architecture_is_served_from_its_file(
    name: str, tiny: Callable[..., Path], to_gguf: Callable[..., Path], runner: Runner
) -> None:
    """As near as norms that are stored plus one, or decays as they are used."""
    model_type, changes = test_architectures.MODELS[name]
    model_dir = tiny(model_type, **changes)
    expected = logits(runner(model_dir), plan(0, 40), plan(40, 1))
    found = logits(runner(to_gguf(model_dir)), plan(0, 40), plan(40, 1))
    assert (found - expected).abs().max() <= (1e-5 if model_type.startswith(test_architectures.INEXACT) else 0)


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.long
def test_blocks_give_what_their_numbers_give(
    model: str, kind: str, to_file_of: Callable[[str, str], Path], from_gguf: Callable[..., Path], runner: Runner
) -> None:
    """To the bit where they become floats, and but for the rounding of rows where they stay blocks."""
    path = to_file_of(model, kind)
    directory = from_gguf(path)
    for options in ({"kernels": "torch"}, {"quantization": "fp16"}):
        both = (logits(runner(source, **options), plan(0, 40)) for source in (path, directory))
        assert _same(model, *both)
    expected, found = (logits(runner(source), plan(0, 40), plan(40, 1)) for source in (directory, path))
    assert 0 < (found - expected).norm() < NEAR * expected.norm()


@pytest.mark.parametrize("model", ["gemma3_text", "granitemoehybrid"])
@pytest.mark.parametrize("kind", BLOCKS)
def test_weights_take_the_bytes_of_the_file(model: str, kind: str, to_file_of: Callable[[str, str], Path]) -> None:
    """The file has headers and a vocabulary besides, memory has the padding of a panel."""
    path, tp = to_file_of(model, kind), TensorParallel(0, 1, LocalCollectives())
    kept = slice_bytes(path, tp, RunnerOptions(num_blocks=4))
    assert kept < path.stat().st_size
    assert kept < slice_bytes(path, tp, RunnerOptions(num_blocks=4, kernels="torch")) / 3


@pytest.mark.parametrize("kind", BLOCKS)
def test_reading_of_blocks_is_told_to_its_end(kind: str, to_file_of: Callable[[str, str], Path]) -> None:
    told: list[tuple[int, int]] = []
    options = RunnerOptions(num_blocks=4, on_read=lambda *read: told.append(read))
    load_model(to_file_of("gemma3_text", kind), TensorParallel(0, 1, LocalCollectives()), options)
    assert {total for _, total in told} == {told[-1][0]}
    assert len(told) > 10


@pytest.mark.parametrize("kind", BLOCKS)
def test_a_sequence_gets_the_same_bits_in_any_company(
    kind: str, to_file_of: Callable[[str, str], Path], runner: Runner
) -> None:
    """Token by token, as a whole, in parts, and beside two others."""
    served = runner(to_file_of("llama", kind))
    alone = logits(served, *(plan(n, 1) for n in range(41)))
    assert torch.equal(logits(served, plan(0, 41, table=1)), alone[-1:])
    assert torch.equal(logits(served, plan(0, 7, table=2), plan(7, 20, table=2)), alone[[6, 26]])
    tables = [list(range(12 * n, 12 * n + 12)) for n in (2, 3, 4)]
    together = StepPlan(1, [*IDS[27:30], *IDS[:5], *IDS[:9]], [3, 5, 9], [27, 0, 0], tables, [0, 1, 2], full_logits=True)
    assert torch.equal(logits(served, together), alone[[29, 4, 8]])


@pytest.mark.parametrize("kind", BLOCKS)
@pytest.mark.long
def test_two_ranks_give_what_one_gives(
    kind: str, to_file_of: Callable[[str, str], Path], runner: Runner, tmp_path: Path
) -> None:
    """Half of the MLP's 768 columns are 384, one and a half of the k-quants' blocks: that weight becomes floats."""
    jobs = []
    expected = {}
    options = {"num_blocks": 64, "block_size": 4, "num_threads": 1}
    for model in MODELS:
        path = to_file_of(model, kind)
        expected[model] = logits(runner(path), plan(0, 40), plan(40, 1))
        jobs.append((path, options, [plan(0, 40), plan(40, 1)]))
    answers = answers_of_ranks(tmp_path, 2, jobs)[0]["jobs"]
    for answer, wanted in zip(answers, expected.values(), strict=True):
        found = torch.cat(answer["answers"])
        assert (found - wanted).norm() < NEAR * wanted.norm()


@pytest.mark.parametrize(("kind", "size", "number"), [("q4_k", 1, 0), ("q8_0", 2, 0), ("q4_k", 2, 8)])
def test_matrices_that_become_floats_are_counted(
    kind: str, size: int, number: int, to_file_of: Callable[[str, str], Path]
) -> None:
    """Of 128 columns of each output and 384 of each MLP: half of, and one and a half of the k-quants' blocks."""
    options = RunnerOptions(num_blocks=8, block_size=4, num_threads=1)
    loaded = load_model(to_file_of("llama", kind), TensorParallel(0, size, LocalCollectives()), options)
    assert loaded.num_unpacked == number


@pytest.mark.parametrize("model", ["llama", "gpt2", "qwen3_moe", *OTHERS])
def test_rows_and_columns_are_those_of_the_directory(
    model: str,
    to_file_of: Callable[[str, str], Path],
    from_gguf: Callable[..., Path],
    weights_of: Callable[[Path], dict[str, Tensor]],
    kernels: NativeKernels,
) -> None:
    """Also where a file has rows in another order, stacked, or as columns: each matrix but the latents' is kept in blocks."""
    path = to_file_of(model, "q4_0")
    expected = weights_of(from_gguf(path))
    _, files = open_gguf(path)
    weight_format = WeightFormat("none", CPU, torch.float32, kernels)
    kept = set()
    with MappedWeights(files, torch.float32, CPU, weight_format, kernels) as weights:
        for name, whole in expected.items():
            for dim in range(whole.dim()):
                count = whole.shape[dim] // 2
                weights.read(name, tuple(whole.shape), out := torch.zeros(whole.narrow(dim, 0, count).shape), dim, count)
                assert torch.equal(out, whole.narrow(dim, count, count)), (name, dim)
            blocks = weights.blocks(name, tuple(whole.shape))
            if blocks is not None:
                kept.add(name)
                packed = weights.packed([blocks.rows(3, 40)], 40)
                assert torch.equal(packed.lookup(torch.arange(40)), whole[3:43]), name
    # GPT-2's are transposed, as config.json has them; routers and positions are float32 in any file.
    floats = ("kv_b_proj.", "mlp.gate.", "wpe.", *((".h.",) if model == "gpt2" else ()))
    matrices = {name for name, whole in expected.items() if whole.dim() == 2}
    assert kept == {name for name in matrices if not any(part in name for part in floats)}


def test_weights_of_gpt2_stay_in_blocks_where_a_checkpoint_has_them_transposed(
    to_file_of: Callable[[str, str], Path], kernels: NativeKernels
) -> None:
    path = to_file_of("gpt2", "q4_0")
    spec, files = open_gguf(path, as_stored=True)
    assert not spec.transposed
    blocks = files.blocks("transformer.h.1.mlp.c_fc.weight")
    assert blocks is not None
    assert blocks.shape == (768, 256)


def test_value_heads_stay_in_blocks_in_the_order_of_the_file(to_file_of: Callable[[str, str], Path]) -> None:
    """Of a checkpoint the columns of the output are in another order."""
    path, name = to_file_of("qwen3_5_text", "q4_k"), "model.layers.0.linear_attn.out_proj.weight"
    for as_stored in (False, True):
        spec, files = open_gguf(path, as_stored=as_stored)
        assert [state.tiled for state in spec.states if isinstance(state, DeltaSpec)] == [as_stored] * 3
        assert (files.blocks(name) is not None) == as_stored


def test_a_file_that_lacks_a_tensor_or_its_end_is_refused(
    to_file_of: Callable[[str, str], Path], runner: Runner, tmp_path: Path
) -> None:
    path, stored = tmp_path / "model.gguf", to_file_of("llama", "q8_0").read_bytes()
    path.write_bytes(stored.replace(b"blk.1.attn_k.weight", b"blk.1.attn_x.weight"))
    with pytest.raises(ModelRefused, match=r"tensor 'blk\.1\.attn_k\.weight' is missing"):
        runner(path)
    path.write_bytes(stored[:-64])
    with pytest.raises(ModelRefused, match="truncated in tensor"):
        runner(path)
