"""Our own engine serves what was written: its logits are those of transformers with the same numbers."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32
from safetensors.torch import load_file, save_file
from torch import Tensor

from ryzanstein.tools.quantize.request import Budget
from ryzanstein.worker.engine.plan import StepPlan
from ryzanstein.worker.model.loading import open_model

from .conftest import config_of

IDS = torch.randint(3, 300, (41,), generator=torch.Generator().manual_seed(5)).tolist()
PARTS = ((0, IDS[:40]), (40, IDS[40:]))
NEAR = 0.1  # random layers multiply an error of less than a hundredth; what is wrong differs by more than 1
REQUESTS: dict[str, tuple[dict[str, Any], set[str | None]]] = {
    "4 bits": ({"method": "rtn"}, {"G4_32"}),
    "4 bits with zero points": ({"method": "rtn", "zero_points": True}, {"G4_32"}),
    "8 bits": ({"method": "rtn", "bits": 8, "group": 64}, {"G8_64", "G8_32"}),
    "groups of 16": ({"method": "rtn", "group": 16}, {None}),
    "W8A8": ({"method": "int8"}, {"G8_64", "G8_32"}),
    "mixed": ({"method": "auto"}, {"G4_32", "G8_32"}),
}


def logits(runner: Any) -> Tensor:
    """The logits [2, V] after 40 tokens at once, and after one more."""
    plans = [StepPlan(1, ids, [len(ids)], [fed], [list(range(12))], [0], full_logits=True) for fed, ids in PARTS]
    return torch.cat([runner.hidden_logits(plan) for plan in plans])


def with_numbers_of(target: Path, reference: Any) -> Any:
    """transformers' model of SRC, its matrices replaced by the numbers in DST; the library of the layout unpacks them."""
    tensors: dict[str, Tensor] = {}
    for file in target.glob("*.safetensors"):
        tensors |= load_file(file)
    for module in [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]:
        scale_OG, levels_OI = tensors[f"{module}.weight_scale"].float(), tensors.get(f"{module}.weight")
        zero_OG = torch.zeros(1, 1)
        if levels_OI is None:
            shape = torch.Size(tensors[f"{module}.weight_shape"].tolist())
            words = tensors[f"{module}.weight_packed"]
            bits = words.shape[1] * 32 // shape[1]
            levels_OI = unpack_from_int32(words, bits, shape)
            if f"{module}.weight_zero_point" in tensors:
                zero_OG = unpack_from_int32(tensors[f"{module}.weight_zero_point"], bits, scale_OG.shape, packed_dim=0)
        levels_OGN = levels_OI.float().unflatten(1, (scale_OG.shape[1], -1))
        with torch.no_grad():
            numbers = (levels_OGN - zero_OG.float().unsqueeze(-1)) * scale_OG.unsqueeze(-1)
            reference.model.get_parameter(f"{module}.weight").copy_(numbers.flatten(1))
    return reference


@pytest.mark.parametrize("name", REQUESTS)
def test_logits_are_those_of_the_numbers_that_were_written(
    name: str, llama: Path, text: Path, *, quantized: Callable[..., Path], reference: Any, runner: Callable[..., Any]
) -> None:
    """As floats but for float32's rounding, in blocks but for that of rows to 8 bits."""
    options, kinds = REQUESTS[name]
    if options["method"] == "auto":
        num_bytes = (llama / "model.safetensors").stat().st_size * 51 // 100
        options = {**options, "calibration": (text,), "num_tokens": 3000, "budget": Budget(0.5, num_bytes)}
    target = quantized(llama, **options)
    groups = config_of(target)["quantization_config"]["config_groups"]
    assert len(groups) == 1 + (name == "mixed") + (name == "8 bits")
    expected = with_numbers_of(target, reference(llama)).logits(IDS)[[39, 40]]
    torch.testing.assert_close(logits(runner(target, kernels="torch")), expected, rtol=1e-4, atol=1e-4)
    assert blocks_of(target) == kinds
    assert 0 < (logits(runner(target)) - expected).norm() < NEAR * expected.norm()


def blocks_of(target: Path) -> set[str | None]:
    """The kinds of block in which the matrices of the layers stay; None is floats."""
    spec, files = open_model(target)
    names = [name for name, _ in files.places() if name.endswith("_proj.weight")]
    assert len(names) == 7 * len(spec.layers)
    found = {None if (blocks := files.blocks(name)) is None else blocks.kind.name for name in names}
    files.close()
    return found


def test_ternary_weights_stay_what_they_were(
    llama: Path, quantized: Callable[..., Path], reference: Any, runner: Callable[..., Any], tmp_path: Path
) -> None:
    trained = Path(shutil.copytree(llama, tmp_path / "trained"))
    tensors = load_file(llama / "model.safetensors")
    for name in tensors:
        if "_proj" in name:
            tensors[name] = tensors[name].sign() * (tensors[name].abs() > 0.05) * 0.09
    save_file(tensors, trained / "model.safetensors", {"format": "pt"})
    target = quantized(trained, method="ternary")
    expected = reference(trained).logits(IDS)[[39, 40]]
    torch.testing.assert_close(logits(runner(target, kernels="torch")), expected, rtol=1e-4, atol=1e-4)
    assert (logits(runner(target)) - expected).norm() < NEAR * expected.norm()
