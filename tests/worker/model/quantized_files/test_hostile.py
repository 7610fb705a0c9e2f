"""Quantized checkpoints that somebody broke, or meant to break: each is refused before anything is allocated, by name."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.refusal import MAX_MESSAGE_CHARS, CheckpointError, ModelRefused

COMPRESSED = "compressed-tensors"
GPTQ = {"method": "gptq", "act_order": True}
AWQ = {"method": "awq"}
PACKED = {"method": COMPRESSED, "more": {"format": "pack-quantized"}, "symmetric": False}
INT = {"method": COMPRESSED, "more": {"format": "int-quantized"}, "bits": 8, "group": None}
BLOCKS = {
    "method": COMPRESSED,
    "more": {"format": "int-quantized", "strategy": "block", "block_structure": [96, 64]},
    "bits": 8,
    "symmetric": False,
}
FP8 = {"method": "fp8", "more": {"weight_block_size": [128, 128]}, "scale_dtype": torch.float32}
BITNET = {"method": "bitnet", "more": {"linear_class": "autobitlinear"}}
QUERY, FILE = "model.layers.0.self_attn.q_proj", "model.safetensors"
WITHIN_S = 10.0
"""Two seconds are meant; a machine that runs other tests as well takes longer."""

Change = Callable[[dict[str, Tensor]], object]


def to(part: str, tensor: Tensor) -> Change:
    return lambda tensors: tensors.update({f"{QUERY}.{part}": tensor})


def without(part: str) -> Change:
    return lambda tensors: tensors.pop(f"{QUERY}.{part}")


def index(number: int) -> Change:
    return lambda tensors: tensors[f"{QUERY}.g_idx"].__setitem__(7, number)


TENSORS: dict[str, tuple[dict[str, Any], Change, str]] = {
    "no zero points": (GPTQ, without("qzeros"), "q_proj.qzeros is missing"),
    "no scales": (GPTQ, without("scales"), "q_proj.scales is missing"),
    "scales of another shape": (
        GPTQ,
        to("scales", torch.ones(5, 256).half()),
        "q_proj.scales has shape [5, 256], needs [4, 256]",
    ),
    "scales that are whole": (GPTQ, to("scales", torch.ones(4, 256).int()), "has dtype I32, needs F32 or F16 or BF16"),
    "levels that are floats": (GPTQ, to("qweight", torch.ones(32, 256)), "q_proj.qweight has dtype F32, needs I32"),
    "levels in a row": (GPTQ, to("qweight", torch.ones(32, dtype=torch.int32)), "needs two dimensions that are not empty"),
    "no levels": (GPTQ, to("qweight", torch.ones(0, 256, dtype=torch.int32)), "needs two dimensions that are not empty"),
    "levels of another matrix": (
        {"method": "awq"},
        lambda tensors: tensors.update(
            {
                f"{QUERY}.{part}": tensors[f"model.layers.0.self_attn.k_proj.{part}"].clone()
                for part in ("qweight", "qzeros", "scales")
            }
        ),
        "q_proj.qweight has the levels of a matrix of shape [128, 256], config.json needs [256, 256]",
    ),
    "an index above": (GPTQ, index(4), "q_proj.g_idx refers to group 4 of 4"),
    "an index below": (GPTQ, index(-1), "q_proj.g_idx refers to group -1 of 4"),
    "a short index": (GPTQ, to("g_idx", torch.zeros(255).int()), "q_proj.g_idx has shape [255], needs [256]"),
    "a bias that nobody reads": (GPTQ, to("bias", torch.ones(256)), "q_proj.bias is not used by this architecture"),
    "awq without scales": (AWQ, without("scales"), "q_proj.scales is missing"),
    "no shape": (PACKED, without("weight_shape"), "q_proj.weight_shape is missing"),
    "another shape": (PACKED, to("weight_shape", torch.tensor([256, 10**12])), "weight_shape is [256, 1000000000000]"),
    "a shape below zero": (PACKED, to("weight_shape", torch.tensor([256, -256])), "q_proj.weight_shape is [256, -256]"),
    "no packed zero points": (PACKED, without("weight_zero_point"), "q_proj.weight_zero_point is missing"),
    "zero points of another shape": (
        PACKED,
        to("weight_zero_point", torch.zeros(32, 5, dtype=torch.int32)),
        "q_proj.weight_zero_point has shape [32, 5], needs [32, 4]",
    ),
    "zero points of a symmetric matrix": (
        {"method": COMPRESSED, "more": {"format": "pack-quantized"}},
        to("weight_zero_point", torch.zeros(32, 4, dtype=torch.int32)),
        "q_proj.weight_zero_point does not fit a scheme of quantization_config.config_groups that is symmetric",
    ),
    "a zero point for each output of blocks": (
        BLOCKS,
        to("weight_zero_point", torch.zeros(256, 4, dtype=torch.int8)),
        "q_proj.weight_zero_point has shape [256, 4], needs [3, 4]",
    ),
    "floats beside levels": (GPTQ, to("weight", torch.ones(256, 256)), f"q_proj.weight is the matrix that {QUERY}.qweight is"),
    "levels beside packed ones": (
        PACKED,
        to("weight", torch.ones(256, 256)),
        f"q_proj.weight is the matrix that {QUERY}.weight_packed is as well",
    ),
    "levels that no scheme has": (
        INT,
        to("weight", torch.zeros(256, 256).to(torch.float8_e4m3fn)),
        "q_proj.weight fits none of quantization_config.config_groups",
    ),
    "no scale of a channel": (INT, without("weight_scale"), "q_proj.weight_scale is missing"),
    "no scale of a block": (FP8, without("weight_scale_inv"), "q_proj.weight_scale_inv is missing"),
    "one scale for all blocks": (FP8, to("weight_scale_inv", torch.ones(1)), "weight_scale_inv has shape [1], needs [2, 2]"),
    "ternary scales for each output": (
        BITNET,
        to("weight_scale", torch.ones(256)),
        "weight_scale has shape [256], needs [] or [1]",
    ),
}
SETTINGS: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "5 bits": (GPTQ, {"bits": 5}, "quantization_config.bits 5 is not supported, only 2, 3, 4, 8"),
    "3 bits less one": (GPTQ, {"bits": 3}, "quantization_config.bits 3 is only supported with checkpoint_format 'gptq_v2'"),
    "true bits": (GPTQ, {"bits": True}, "quantization_config.bits True is not supported"),
    "no bits": (GPTQ, {"bits": None}, "quantization_config.bits None is not supported"),
    "bits of another matrix": (GPTQ, {"bits": 8}, "model.layers.0."),
    "no group at all": (GPTQ, {"group_size": 0}, "quantization_config.group_size must be a whole number above 0, got 0"),
    "half a group": (GPTQ, {"group_size": 0.5}, "quantization_config.group_size must be a whole number above 0, got 0.5"),
    "a group beyond counting": (GPTQ, {"group_size": 10**30}, "quantization_config.group_size must be at most 2147483647"),
    "a group of three": (GPTQ, {"group_size": 3}, "qzeros has shape [6, 32], needs [128, 32]"),
    "marlin": (GPTQ, {"checkpoint_format": "marlin"}, "quantization_config.checkpoint_format 'marlin' is not supported"),
    "other modules": (GPTQ, {"dynamic": {"-:.*": {}}}, "quantization_config.dynamic is not supported"),
    "gemv": (AWQ, {"version": "gemv"}, "quantization_config.version 'gemv' is not supported, only 'gemm'"),
    "awq without zero points": (AWQ, {"zero_point": False}, "quantization_config.zero_point False is not supported"),
    "nvfp4": (INT, {"format": "nvfp4-pack-quantized"}, "format 'nvfp4-pack-quantized' is not supported"),
    "sparse": (INT, {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.format is not supported"),
    "transformed": (INT, {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is not supported"),
    "no schemes": (INT, {"config_groups": {}}, "config_groups must have 1 to 64 entries, got 0"),
    "too many schemes": (
        INT,
        {"config_groups": {str(number): {} for number in range(65)}},
        "config_groups must have 1 to 64 entries, got 65",
    ),
    "schemes in a list": (INT, {"config_groups": [1]}, "config_groups must be an object, got [1]"),
    "a scheme that is a word": (INT, {"config_groups": {"a": "x"}}, "config_groups.a must be an object"),
    "5 packed bits": (
        PACKED,
        {"config_groups": {"a": {"weights": {"num_bits": 5, "strategy": "group", "group_size": 64}}}},
        "config_groups.a.weights.num_bits 5 is not supported",
    ),
    "blocks of one size": (FP8, {"weight_block_size": [128]}, "weight_block_size must be two whole numbers above 0"),
    "blocks of nothing": (FP8, {"weight_block_size": [0, 128]}, "weight_block_size must be two whole numbers above 0"),
    "e5m2": (FP8, {"fmt": "e5m2"}, "quantization_config.fmt 'e5m2' is not supported"),
    "ternary online": (BITNET, {"quantization_mode": "online"}, "quantization_mode 'online' is not supported"),
    "norms before matrices": (BITNET, {"use_rms_norm": True}, "use_rms_norm True is not supported"),
    "another method": (GPTQ, {"quant_method": "aqlm"}, "quant_method 'aqlm'"),
    "a method of a megabyte": (GPTQ, {"quant_method": "x" * 10**6}, "quantization_config is not supported"),
    "a method in a list": (GPTQ, {"quant_method": ["gptq"]}, "quantization_config is not supported (quant_method ['gptq'])"),
    "nothing of it": (BITNET, {"quant_method": "fp8"}, "but no tensor is quantized"),
}


@pytest.fixture
def refusal(runner: Callable[..., Any]) -> Callable[[Path], str]:
    def load(model_dir: Path) -> str:
        began = time.monotonic()
        with pytest.raises(ModelRefused) as refused:
            runner(model_dir)
        assert time.monotonic() - began < WITHIN_S
        assert len(str(refused.value)) <= MAX_MESSAGE_CHARS
        return str(refused.value)

    return load


@pytest.mark.parametrize("name", list(TENSORS))
def test_tensors_that_do_not_fit_are_named(
    name: str, recipe: Callable[..., Any], broken: Callable[..., Path], refusal: Callable[[Path], str]
) -> None:
    made, change, named = TENSORS[name]
    directory = broken(recipe(**made), change)
    message = refusal(directory)
    assert named in message
    assert message.startswith(str(directory))


@pytest.mark.parametrize("name", list(SETTINGS))
def test_settings_that_are_not_read_are_named(
    name: str, recipe: Callable[..., Any], broken: Callable[..., Path], refusal: Callable[[Path], str]
) -> None:
    made, settings, named = SETTINGS[name]
    assert named in refusal(broken(recipe(**made), **settings))


def test_a_file_that_ends_early_is_named(
    recipe: Callable[..., Any], broken: Callable[..., Path], refusal: Callable[[Path], str]
) -> None:
    directory = broken(recipe(**GPTQ))
    path = directory / FILE
    path.write_bytes(path.read_bytes()[:-1000])
    assert refusal(directory).startswith(f"{path}: truncated in tensor ")


def test_transposed_weights_are_refused(
    recipe: Callable[..., Any], broken: Callable[..., Path], refusal: Callable[[Path], str]
) -> None:
    """A square matrix would not differ in shape."""
    directory = broken(recipe(**GPTQ))
    config = json.loads((directory / "config.json").read_text())
    sizes = {"n_embd": 256, "n_head": 8, "n_layer": 2, "n_positions": 512, "vocab_size": 320}
    kept = {"quantization_config": config["quantization_config"]}
    (directory / "config.json").write_text(json.dumps({"model_type": "gpt2", **sizes, **kept}))
    assert refusal(directory) == (
        "config.json: quantized weights of model_type 'gpt2' are not read: floats would be transposed"
    )


def logits(runner: Any) -> Tensor:
    return runner.hidden_logits(StepPlan(1, list(range(3, 23)), [20], [0], [list(range(5))], [0], full_logits=True))


def test_a_bias_of_zeros_that_nobody_reads_is_left_out(
    recipe: Callable[..., Any], published: Callable[..., Any], broken: Callable[..., Path], runner: Callable[..., Any]
) -> None:
    """AutoGPTQ writes one for every module."""
    with_bias = broken(recipe(**GPTQ), to("bias", torch.zeros(256).half()))
    assert torch.equal(logits(runner(with_bias)), logits(runner(published(recipe(**GPTQ)).directory)))


def test_modules_that_were_not_converted_are_read_as_floats(
    recipe: Callable[..., Any], published: Callable[..., Any], broken: Callable[..., Path], runner: Callable[..., Any]
) -> None:
    """Without kernels everything becomes floats: the numbers of the format in float32 are the same to the bit."""
    made = published(recipe(**GPTQ))

    def restore(tensors: dict[str, Tensor]) -> None:
        for part in ("qweight", "qzeros", "scales", "g_idx"):
            tensors.pop(f"{QUERY}.{part}")
        tensors[f"{QUERY}.weight"] = load_file(made.floats / FILE)[f"{QUERY}.weight"]

    mixed = broken(recipe(**GPTQ), restore, modules_to_not_convert=["self_attn.q_proj"])
    found, expected = (logits(runner(path, kernels="torch")) for path in (mixed, made.floats))
    assert torch.equal(found, expected)


def test_refusals_are_checkpoint_errors(
    recipe: Callable[..., Any], broken: Callable[..., Path], runner: Callable[..., Any]
) -> None:
    with pytest.raises(CheckpointError, match="is missing"):
        runner(broken(recipe(**AWQ), without("qzeros")))


def test_a_directory_of_only_a_gguf_file_says_how_to_serve_it(tmp_path: Path, refusal: Callable[[Path], str]) -> None:
    (tmp_path / "config.json").write_text((Path(__file__).parents[4] / "shared/ryzanstein/demo/config.json").read_text())
    (tmp_path / "some.gguf").write_bytes(b"GGUF")
    message = refusal(tmp_path)
    assert f"some.gguf can be served as it is, with --model {tmp_path / 'some.gguf'}" in message
    assert "`ryzanstein convert`" in message
