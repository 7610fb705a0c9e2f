"""Whole quantized models, read by transformers with compressed-tensors."""

import io
import json
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ryzanstein.tools.quantize.methods.grids import Grid, fitted
from ryzanstein.tools.quantize.request import Budget, Request
from ryzanstein.tools.quantize.run import quantize_model
from ryzanstein.tools.quantize.texts import read_texts
from ryzanstein.worker.refusal import ModelRefused

from .conftest import CONTEXT, config_of

TOKENS = 3000


def opened(model_dir: Path, *, dequantize: bool = False) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import AutoModelForCausalLM, CompressedTensorsConfig, logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        options = {"quantization_config": CompressedTensorsConfig(dequantize=True)} if dequantize else {}
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, **options).eval()
        with torch.inference_mode():
            model(torch.tensor([[1, 2, 3]]))  # the library decompresses at the first call
    return model


@torch.inference_mode()
def off(model: Any, source: Any) -> float:
    """The norm of the error of the logits over their norm."""
    torch.manual_seed(4)
    ids_1T = torch.randint(3, 300, (1, 96))
    found, expected = (each(ids_1T).logits for each in (model, source))
    return ((found - expected).norm() / expected.norm()).item()


@torch.inference_mode()
def perplexity(model_dir: Path, ids_WT: torch.Tensor) -> float:
    logits = opened(model_dir)(ids_WT).logits[:, :-1].log_softmax(-1)
    return math.exp(-logits.gather(2, ids_WT[:, 1:].unsqueeze(2)).mean().item())


@pytest.mark.parametrize(("bits", "zero_points", "bound"), [(4, False, 0.25), (4, True, 0.25), (8, False, 0.02)])
def test_transformers_has_the_weights_that_were_meant(
    bits: int, zero_points: bool, bound: float, llama: Path, quantized: Callable[..., Path]
) -> None:
    target = quantized(llama, method="rtn", bits=bits, zero_points=zero_points)
    # Without `dequantize` the library makes room for zero points that are not packed, and refuses packed ones.
    model, source = opened(target, dequantize=zero_points), load_file(llama / "model.safetensors")
    names = [name for name in source if "_proj.weight" in name]
    assert len(names) == 14
    for name in names:
        expected = fitted(source[name], Grid(bits, 32, zero_points)).floats()
        if zero_points:  # that way of reading rounds to the scales' dtype
            expected = expected.bfloat16().float()
        assert torch.equal(model.get_parameter(name), expected), name
    for name in source.keys() - names:
        assert torch.equal(model.get_parameter(name), source[name]), name
    assert 0 < off(model, opened(llama)) < bound


def test_w8a8(llama: Path, quantized: Callable[..., Path]) -> None:
    target = quantized(llama, method="int8")
    config = config_of(target)["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"]
    assert 0 < off(opened(target), opened(llama)) < 0.05


ARCHITECTURES: dict[str, tuple[str, dict[str, object]]] = {
    "gemma3_text": ("gemma3_text", {"head_dim": 16, "sliding_window": 32}),
    "tied": ("qwen2", {"tie_word_embeddings": True}),
    "fused": ("phi3", {}),
    "plain MLP": ("starcoder2", {}),
    "one layer": ("llama", {"num_hidden_layers": 1}),
    "short convolutions": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_auto_adjust_ff_dim": False}),
    "delta rule": (
        "qwen3_5_text",
        {
            "head_dim": 16,
            "full_attention_interval": 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    ),
    "Mamba 2": (
        "granitemoehybrid",
        {
            "layer_types": ["mamba", "attention"],
            "num_local_experts": 0,
            "mamba_n_heads": 8,
            "mamba_d_state": 16,
            "shared_intermediate_size": 96,
        },
    ),
    "Mamba 2 beside attention": ("falcon_h1", {"mamba_d_ssm": 128, "mamba_n_heads": 8, "mamba_d_state": 16}),
    "own heads": (
        "gemma4_text",
        {"head_dim": 16, "global_head_dim": 32, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
    ),
    "odd width": ("llama", {"intermediate_size": 88}),  # 16 does not divide it: down_proj stays in floats
}


IN_8_BITS = {
    **dict.fromkeys(("delta rule", "short convolutions", "Mamba 2", "Mamba 2 beside attention"), (8, 0.05)),
    "own heads": (8, 0.15),
}


@pytest.mark.parametrize("kind", ARCHITECTURES)
@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_architectures(kind: str, method: str, tiny: Callable[..., Path], text: Path, quantized: Callable[..., Path]) -> None:
    model_type, changes = ARCHITECTURES[kind]
    source = tiny(model_type, **changes)
    # Products of projections, and keys that are made as long as others, make more of an error: 4 bits show too much of it.
    # So do scores that are not scaled down.
    bits, bound = IN_8_BITS.get(kind, (4, 0.35))
    target = quantized(source, method=method, bits=bits, calibration=(text,), num_tokens=TOKENS)
    assert 0 < off(opened(target), opened(source)) < bound
    stays = "down_proj stays in floats" in (target.parent / "said.txt").read_text()
    assert stays == (kind == "odd width")


GEMMA4: dict[str, object] = {
    "head_dim": 16,
    "global_head_dim": 32,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "hidden_size_per_layer_input": 32,
    "vocab_size_per_layer_input": 320,
    "num_kv_shared_layers": 2,
}


@pytest.mark.parametrize("method", ["rtn", "int8"])
def test_layers_that_read_more_than_states(method: str, tiny: Callable[..., Path], quantized: Callable[..., Path]) -> None:
    source = tiny("gemma4_text", **GEMMA4)
    # Scores are not scaled down: random weights make more of an error.
    assert 0 < off(opened(quantized(source, method=method, bits=8)), opened(source)) < 0.15


def test_text_is_not_run_through_layers_that_read_more(
    tiny: Callable[..., Path], text: Path, quantized: Callable[..., Path]
) -> None:
    with pytest.raises(ModelRefused, match="layers of this gemma4_text read inputs of their own"):
        quantized(tiny("gemma4_text", **GEMMA4), method="gptq", calibration=(text,), num_tokens=TOKENS)


@pytest.mark.parametrize("method", ["rtn", "gptq", "awq", "int8", "auto"])
def test_the_reported_loss_is_what_transformers_measures(
    method: str, llama: Path, text: Path, quantized: Callable[..., Path]
) -> None:
    target = quantized(llama, method=method, calibration=(text,), num_tokens=TOKENS)
    report = json.loads((target / "quantization_report.json").read_text())["held_out"]
    held_WT = read_texts(llama / "tokenizer.json", [text], TOKENS, CONTEXT).held_WT
    original, found = perplexity(llama, held_WT), perplexity(target, held_WT)
    assert report["num_tokens"] == held_WT.numel() - len(held_WT)
    assert report["original_perplexity"] == pytest.approx(original, rel=1e-4)
    bound = (
        5e-3 if method == "int8" else 1e-3
    )  # the library's rows have a scale of 1/127.5 of the largest number, ours of 1/127
    assert report["perplexity"] == pytest.approx(found, rel=bound)
    assert report["relative"] == pytest.approx(found / original - 1, abs=bound)
    if method == "auto":
        assert report["upper"] <= 0.01


def test_auto_mixes_formats_by_size(llama: Path, text: Path, quantized: Callable[..., Path]) -> None:
    whole = (llama / "model.safetensors").stat().st_size
    target = quantized(llama, method="auto", calibration=(text,), num_tokens=TOKENS, budget=Budget(0.5, whole * 51 // 100))
    groups = config_of(target)["quantization_config"]["config_groups"].values()
    assert {group["weights"]["num_bits"] for group in groups} == {4, 8}
    assert sum(file.stat().st_size for file in target.glob("*.safetensors")) < 0.54 * whole
    together = [
        {name.rsplit(".", 1)[0] for name in group["targets"] if name.endswith(("q_proj", "k_proj"))} for group in groups
    ]
    assert not together[0] & together[1]  # queries and keys have one format
    assert 0 < off(opened(target), opened(llama)) < 0.3


def test_a_budget_that_cannot_be_kept_is_refused(
    llama: Path, text: Path, quantized: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match=r"--budget: perplexity .*more than 0\.01%"):
        quantized(llama, method="rtn", calibration=(text,), num_tokens=TOKENS, budget=Budget(0.0001))
    with pytest.raises(ModelRefused, match=r"--budget: 1000 bytes; the weights have \d+ with the fewest bits"):
        quantized(llama, method="auto", calibration=(text,), num_tokens=TOKENS, budget=Budget(0.02, 1000))
    assert list(tmp_path.iterdir()) == []


@torch.inference_mode()
def test_ternary_is_for_models_that_were_trained_so(
    llama: Path, text: Path, tiny: Callable[..., Path], quantized: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ModelRefused, match="is not ternary"):
        quantized(llama, method="ternary")
    with pytest.raises(ModelRefused, match=r"more than 2\.00%"):
        quantized(llama, method="ternary", calibration=(text,), num_tokens=TOKENS)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32)
    for name, parameter in model.named_parameters():
        if "_proj" in name:
            parameter.copy_(parameter.sign() * (parameter.abs() > parameter.abs().median()) * 0.09)
    trained = tmp_path / "trained"
    model.save_pretrained(trained)
    (trained / "tokenizer.json").write_bytes((llama / "tokenizer.json").read_bytes())
    out = io.StringIO()
    for name, calibration in (("without", ()), ("with", (text,))):
        quantize_model(trained, tmp_path / name, Request("ternary", calibration=calibration, num_tokens=TOKENS), out)
    config = config_of(tmp_path / "with")["quantization_config"]
    assert (config["quant_method"], config["linear_class"]) == ("bitnet", "autobitlinear")
    stored = load_file(tmp_path / "with" / "model-00001-of-00003.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    scale, packed = stored[f"{name}_scale"], stored[name]
    levels = torch.cat([(packed >> shift & 3).to(torch.int8) - 1 for shift in (0, 2, 4, 6)])
    torch.testing.assert_close(levels * scale, model.get_parameter(name).detach())


def test_experts(tiny: Callable[..., Path], text: Path, quantized: Callable[..., Path]) -> None:
    """The router stays in floats, and so do experts that the text hardly reaches."""
    source = tiny("mixtral", num_local_experts=4)
    target = quantized(source, method="gptq", calibration=(text,), num_tokens=TOKENS)
    assert 0 < off(opened(target), opened(source)) < 0.35
    targets = config_of(target)["quantization_config"]["config_groups"]["group_0"]["targets"]
    assert any(".experts.0.w1" in name for name in targets)
    assert not any("gate" in name for name in targets)
    few = quantized(source, "few", method="gptq", calibration=(text,), num_tokens=CONTEXT)
    assert len(config_of(few)["quantization_config"]["config_groups"]["group_0"]["targets"]) <= len(targets)


def test_a_model_without_plain_matrices_is_refused(tiny: Callable[..., Path], quantized: Callable[..., Path]) -> None:
    source = tiny("llama", hidden_size=40, intermediate_size=24, num_attention_heads=5, num_key_value_heads=5)
    with pytest.raises(ModelRefused, match="no matrix of its layers can be quantized"):
        quantized(source, method="rtn")
