"""Windows and latents over more keys than a step reads as a padded batch, and checkpoints whose names lack their first part."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

WINDOW = 140
SHAPE = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "intermediate_size": 64,
    "vocab_size": 251,
    "max_position_embeddings": 512,
}
LATENT = {
    "num_key_value_heads": 6,
    "kv_lora_rank": 25,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 5,
    "qk_rope_head_dim": 8,
    "v_head_dim": 9,
    "moe_intermediate_size": 24,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "n_group": 3,
    "topk_group": 2,
}
MODELS = {
    "windows": ("Gemma2Config", {**SHAPE, "num_key_value_heads": 3, "head_dim": 8, "sliding_window": WINDOW}),
    "latents": ("DeepseekV3Config", {**SHAPE, **LATENT}),
}
LAYOUTS = {"adjacent": lambda s: range(s * 80, s * 80 + 80), "scattered": lambda s: range(s, 240, 3)}


def write(model_dir: Path, config_class: str, **fields: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import transformers

        transformers.logging.disable_progress_bar()
        torch.manual_seed(0)
        config = getattr(transformers, config_class)(**fields)
        model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter) * 0.2)
        model.save_pretrained(model_dir)
    return model


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_long_prompts_are_answered_beside_short_ones(
    tmp_path: Path, runner: Callable[..., Any], sequences: type, name: str, layout: str
) -> None:
    config_class, fields = MODELS[name]
    model = write(tmp_path, config_class, **fields)
    generator = torch.Generator().manual_seed(0)
    lengths, num_decoded = (301, 137, 9), 8
    ids = [torch.randint(251, (length + num_decoded,), generator=generator).tolist() for length in lengths]
    with torch.inference_mode():
        expected = [model(torch.tensor([row])).logits[0] for row in ids]
    books = sequences(runner(tmp_path, num_blocks=240), [list(LAYOUTS[layout](s)) for s in range(3)])
    books.start([row[:length] for row, length in zip(ids, lengths, strict=True)])
    steps = [{0: 129}, {0: 33, 1: 50}, {0: 1, 1: 87, 2: 8}, {0: 138, 2: 1}]
    for num_new in steps:
        last = books.runner.hidden_logits(books.plan(num_new))
    assert (last[0] - expected[0][300]).abs().max() < 1e-4
    for index in range(num_decoded):
        for s, length in enumerate(lengths):
            books.ids[s].append(ids[s][length + index])
        logits = books.runner.hidden_logits(books.plan({0: 1, 1: 1, 2: 1}))
        for s, length in enumerate(lengths):
            assert (logits[s] - expected[s][length + index]).abs().max() < 1e-4


@pytest.mark.parametrize(
    ("config_class", "fields"),
    [
        ("GPT2Config", {"n_embd": 48, "n_layer": 2, "n_head": 6, "vocab_size": 251, "n_positions": 64}),
        ("BloomConfig", {"hidden_size": 48, "n_layer": 2, "n_head": 6, "vocab_size": 251}),
    ],
)
def test_names_without_their_first_part_are_understood(
    tmp_path: Path, runner: Callable[..., Any], sequences: type, config_class: str, fields: dict[str, Any]
) -> None:
    model = write(tmp_path, config_class, **fields, bos_token_id=1, eos_token_id=2)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("transformer."): x for name, x in tensors.items()}, tmp_path / "model.safetensors")
    books = sequences(runner(tmp_path), [list(range(8))])
    books.start([list(range(9, 30))])
    logits = books.runner.hidden_logits(books.plan({0: 21}))
    with torch.inference_mode():
        expected = model(torch.tensor([list(range(9, 30))])).logits[0, -1]
    assert (logits[0] - expected).abs().max() < 1e-4
