"""Multimodal checkpoints as transformers writes and hubs have them: their text half gives transformers' logits."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from ryzanstein.tools.convert import from_checkpoint
from ryzanstein.worker.architectures.registry import read_spec
from ryzanstein.worker.checkpoints.safetensors_files import SafetensorsFiles
from ryzanstein.worker.checkpoints.tensor_files import read_tensor_files
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.runner import ModelRunner
from ryzanstein.worker.refusal import CheckpointError

TEXT = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 200,
    "max_position_embeddings": 256,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "out_hidden_size": 64}
ROPE = {"rope_theta": 1e6, "mrope_section": [2, 3, 3], "rope_type": "default"}
DELTA = {
    "full_attention_interval": 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "rope_parameters": {"rope_theta": 1e6, "mrope_section": [1, 1, 0], "mrope_interleaved": True, "rope_type": "default"},
}
MODELS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gemma3": ("Gemma3", {**TEXT, "sliding_window": 8}, SIGLIP),
    "gemma4": (
        "Gemma4",
        {
            **TEXT,
            "sliding_window": 8,
            "global_head_dim": 32,
            "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 200,
        },
        {**SIGLIP, "num_key_value_heads": 2, "head_dim": 16},
    ),
    "mistral3": ("Mistral3", TEXT, {**SIGLIP, "model_type": "pixtral"}),
    "qwen2_5_vl": ("Qwen2_5_VL", {**{k: v for k, v in TEXT.items() if k != "head_dim"}, "rope_parameters": ROPE}, QWEN_VISION),
    "qwen2_vl": (
        "Qwen2VL",
        {**{k: v for k, v in TEXT.items() if k != "head_dim"}, "rope_parameters": ROPE},
        {"depth": 1, "embed_dim": 32, "num_heads": 2, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {**TEXT, "rope_parameters": {**ROPE, "mrope_interleaved": True}},
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            **TEXT,
            "rope_parameters": {**ROPE, "mrope_interleaved": True},
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "decoder_sparse_step": 1,
        },
        {**QWEN_VISION, "deepstack_visual_indexes": [0]},
    ),
    "qwen3_5": ("Qwen3_5", {**TEXT, **DELTA}, QWEN_VISION),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **{k: v for k, v in TEXT.items() if k != "intermediate_size"},
            **DELTA,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 32,
        },
        QWEN_VISION,
    ),
}
# As the hub has them: names from before transformers renamed its modules.
OLD_NAMES = {
    "gemma3": (("model.language_model.", "language_model.model."), ("model.", "")),
    "mistral3": (("model.language_model.", "language_model.model."), ("lm_head.", "language_model.lm_head."), ("model.", "")),
    "qwen2_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
    "qwen2_5_vl": (("model.language_model.", "model."), ("model.visual.", "visual.")),
}


def write(kind: str, folder: Path) -> Any:
    """Writes a random model; returns it."""
    name, text, vision = MODELS[kind]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
        torch.manual_seed(5)
        model = getattr(transformers, f"{name}ForConditionalGeneration")(config).float().eval()
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.randn_like(each) * 0.08)
    model.save_pretrained(folder)
    return model


def logits_of(model: Any, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids])).logits[0].float()


def rename(folder: Path, pairs: tuple[tuple[str, str], ...]) -> None:
    (file,) = folder.glob("*.safetensors")
    renamed = {}
    for name, tensor in load_file(file).items():
        old, new = next(((old, new) for old, new in pairs if name.startswith(old)), ("", ""))
        renamed[new + name.removeprefix(old)] = tensor
    save_file(renamed, file, {"format": "pt"})


def as_on_the_hub(folder: Path) -> None:
    """The experts of Qwen 3 VL with inputs before outputs."""
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    turned = {name: each.transpose(1, 2).contiguous() for name, each in tensors.items() if "experts." in name}
    assert len(turned) == 4
    save_file(tensors | turned, file, {"format": "pt"})


@pytest.mark.parametrize(("kind", "names"), [*((kind, "new") for kind in MODELS), *((kind, "old") for kind in OLD_NAMES)])
def test_the_text_half_gives_transformers_logits(
    kind: str, names: str, tmp_path: Path, runner: Callable[..., ModelRunner]
) -> None:
    model = write(kind, tmp_path)
    if names == "old":
        rename(tmp_path, OLD_NAMES[kind])
    ids = [3, 17, 90, 4, 55, 120, 7, 31, 9, 11, 62, 77]
    expected, ours = logits_of(model, ids), runner(tmp_path)
    for length in (3, 7, len(ids)):
        found = ours.hidden_logits(StepPlan(1, ids[:length], [length], [0], [[0, 1, 2]], [0], True))
        assert found is not None
        torch.testing.assert_close(found[0], expected[length - 1], rtol=1e-3, atol=1e-3)


def test_stacked_experts_of_the_hub_give_transformers_logits(tmp_path: Path, runner: Callable[..., ModelRunner]) -> None:
    model = write("qwen3_vl_moe", tmp_path)
    as_on_the_hub(tmp_path)
    ids = [3, 17, 90, 4, 55, 120, 7]
    found = runner(tmp_path).hidden_logits(StepPlan(1, ids, [len(ids)], [0], [[0, 1, 2]], [0], True))
    assert found is not None
    torch.testing.assert_close(found[0], logits_of(model, ids)[-1], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("layout", ["transformers", "hub"])
def test_any_slice_of_a_stacked_expert_is_read(layout: str, tmp_path: Path) -> None:
    """By ranks, and whole by what writes GGUF files."""
    write("qwen3_vl_moe", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    experts = "model.language_model.layers.1.mlp.experts."
    gate_up, down = (load_file(file)[experts + name][2] for name in ("gate_up_proj", "down_proj"))
    if layout == "hub":
        as_on_the_hub(tmp_path)
    entries = read_tensor_files(tmp_path)
    files = SafetensorsFiles(tmp_path, entries)
    for name, whole in (("gate", gate_up[:48]), ("up", gate_up[48:]), ("down", down)):
        shape = tuple(whole.shape)
        files.check(name := f"model.layers.1.mlp.experts.2.{name}_proj.weight", shape)
        for dim, start, count in ((0, 0, shape[0]), (0, 16, 32), (1, 0, shape[1]), (1, 8, 24), (1, shape[1] - 8, 16)):
            kept = min(count, shape[dim] - start)
            out = torch.zeros(*(count if each == dim else shape[each] for each in (0, 1)))
            files.read(name, shape, out, dim, start)
            assert torch.equal(out.narrow(dim, 0, kept), whole.narrow(dim, start, kept))
        assert np.array_equal(from_checkpoint._mapped(entries[name], shape), whole.numpy())
    files.close()


def test_what_a_checkpoint_leaves_out_is_its_classs_default() -> None:
    """The text_config of Gemma 3 4B on the hub."""
    from ryzanstein.worker.architectures.registry import spec_of
    from ryzanstein.worker.architectures.text_half import text_half

    text = {"hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}  # fmt: skip
    config = {"model_type": "gemma3", "text_config": text, "vision_config": {}, "eos_token_id": [1, 106]}
    half = text_half(config)
    spec = spec_of(half)
    reference = transformers.Gemma3TextConfig(**text)
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim) == (8, 4, 256)
    assert (spec.vocab_size, spec.context_length) == (reference.vocab_size, reference.max_position_embeddings)
    assert spec.tied_head
    assert half["eos_token_id"] == [1, 106]


@pytest.mark.parametrize("kind", MODELS)
def test_a_text_config_with_nothing_in_it_is_that_of_its_class(kind: str) -> None:
    """transformers 4 saved only what differs from the class."""
    from ryzanstein.worker.architectures.registry import values_of
    from ryzanstein.worker.architectures.text_half import text_half

    inner = getattr(transformers, f"{MODELS[kind][0]}Config")().text_config.model_type
    outer = getattr(transformers, f"{MODELS[kind][0]}Config")(text_config={"model_type": inner})
    reference = outer.text_config
    half = text_half({"model_type": kind, "text_config": {"model_type": inner}})
    values = values_of(half)
    names = ["num_attention_heads", "num_key_value_heads", "max_position_embeddings", "vocab_size"]
    if kind == "mistral3":  # as for a Mistral by itself, sizes must be there
        names = ["num_key_value_heads"]
    assert {name: values.count(name) for name in names} == {name: getattr(reference, name) for name in names}
    if "rope_theta" in reference.rope_parameters:
        assert values.number("rope_theta", 10000.0) == reference.rope_parameters["rope_theta"]
    assert values.number("rms_norm_eps", 1e-6) == reference.rms_norm_eps
    assert values.flag("tie_word_embeddings") is outer.tie_word_embeddings
    if kind.startswith("qwen3") or kind == "gemma3":
        assert values.count("head_dim") == reference.head_dim


def test_the_first_configs_of_qwen_have_the_text_half_at_the_top(tmp_path: Path) -> None:
    text = {key: value for key, value in TEXT.items() if key != "head_dim"}
    rope = {"type": "mrope", "mrope_section": [2, 3, 3]}
    text |= {"hidden_act": "silu", "rms_norm_eps": 1e-6}
    config = {**text, "model_type": "qwen2_5_vl", "vision_config": {}, "rope_scaling": rope}
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = read_spec(tmp_path)
    assert (spec.model_type, spec.num_layers, spec.rotaries[0].scaling) == ("qwen2", 2, None)


def test_layers_that_predict_further_tokens_are_not_read(tmp_path: Path, runner: Callable[..., ModelRunner]) -> None:
    """As the checkpoints of Qwen 3.5 have them, beside a vision tower."""
    model = write("qwen3_5", tmp_path)
    (file,) = tmp_path.glob("*.safetensors")
    further = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.layers.0.mlp.gate_proj.weight": torch.zeros(96, 64)}
    save_file(load_file(file) | further, file, {"format": "pt"})
    ids = [3, 17, 90, 4, 55, 120, 7]
    found = runner(tmp_path).hidden_logits(StepPlan(1, ids, [len(ids)], [0], [[0, 1, 2]], [0], True))
    assert found is not None
    torch.testing.assert_close(found[0], logits_of(model, ids)[-1], rtol=1e-3, atol=1e-3)


def test_other_multimodal_models_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llava", "text_config": {"model_type": "llama"}}))
    with pytest.raises(CheckpointError, match=r"'llava' with a text_config is a multimodal model"):
        read_spec(tmp_path)
