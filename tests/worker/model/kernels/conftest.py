"""Random numbers, the libraries of a wheel, and every kernel's results."""

import fcntl
import hashlib
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels.compiling import compile_library, find_compiler, ingredients
from ryzanstein.worker.kernels.functions.attention import ColdKeys, PagedKeys
from ryzanstein.worker.kernels.functions.blocks import BLOCKS
from ryzanstein.worker.kernels.functions.cold_layout import CHANNELS, FP8, FP8_VALUES, INT8, ColdLayout
from ryzanstein.worker.kernels.functions.draw import Draw
from ryzanstein.worker.kernels.functions.recurrent.mamba import GroupScales, MambaHeads
from ryzanstein.worker.kernels.functions.recurrent.slots import SlotRuns, SlotSizes
from ryzanstein.worker.kernels.functions.rows import Angles
from ryzanstein.worker.kernels.levels import ProcessorLevel, best_level
from ryzanstein.worker.kernels.native import NativeKernels

Normal = Callable[..., Tensor]


@pytest.fixture(scope="session")
def normal() -> Normal:
    """Normal numbers of a shape: `normal(seed, *shape)`."""

    def numbers(seed: int, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    return numbers


@pytest.fixture(scope="session")
def level_library(pytestconfig: pytest.Config) -> Callable[[ProcessorLevel], Path]:
    """The library that a wheel carries for a level: compiled once, by whichever process of tests is first."""
    source = hashlib.sha256("".join(ingredients()).encode()).hexdigest()[:16]
    folder = Path(pytestconfig.cache.mkdir("kernels"))

    def compiled(level: ProcessorLevel) -> Path:
        path = folder / f"{level.name}-{source}.so"
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                compile_library(find_compiler(), level.target, path)
        return path

    return compiled


@pytest.fixture(scope="session")
def libraries(level_library: Callable[[ProcessorLevel], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What a wheel carries, as far as this CPU uses it."""
    folder = tmp_path_factory.mktemp("lib")
    level = best_level(platform.machine(), Path("/proc/cpuinfo").read_text())
    shutil.copy(level_library(level), folder / f"{level.name}.so")
    return folder


@pytest.fixture(scope="session")
def results(normal: Normal) -> Callable[..., dict[str, Tensor]]:
    """Computes with every kernel, on sizes that are and are not multiples of what registers hold.

    `results(kernels)`, or `results(kernels, numbers)` with other numbers than normal ones.
    """

    def everything(kernels: NativeKernels, numbers: Normal = normal) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for compute in (_products, _rows, _rotated, _attended, _attended_cold, _attended_parts, _drawn, _delta, _mamba):
            found |= compute(kernels, numbers)
        return found

    return everything


def _products(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    weight_OI, bias_O, x_TI = normal(1, 83, 1300), normal(2, 83), normal(3, 9, 1300)
    found = {"float_product_unpacked": kernels.floats.product_unpacked(x_TI, weight_OI, bias_O)}
    for dtype in (torch.float32, torch.float16):
        packed = kernels.floats.pack(weight_OI, dtype)
        found[f"float_product {dtype}"] = kernels.floats.product(x_TI, packed, bias_O, 83)
    packed_H = torch.stack([kernels.floats.pack(normal(4 + h, 30, 50), torch.float32) for h in range(3)])
    found["float_product_by_head"] = kernels.floats.product_by_head(normal(8, 3, 5, 50), packed_H, 30)
    levels_OI = (normal(9, 83, 1300) * 40).clamp(-127, 127).to(torch.int8)
    for block, width in ((1, 1300), (128, 1280)):
        packed = kernels.int8.pack(levels_OI[:, :width])
        found[f"int8_product {block}"] = kernels.int8.product(x_TI[:, :width], packed, bias_O.abs(), block)
        found[f"int8_rows {block}"] = kernels.int8.rows(packed, bias_O.abs(), torch.arange(80, 90), width, block)
        found[f"transform_rows {block}"] = kernels.int8.transform_rows(x_TI[:, :width], block)
    return found | _blocks(kernels, normal(3, 9, 1024), bias_O)


def _blocks(kernels: NativeKernels, x_TI: Tensor, bias_O: Tensor) -> dict[str, Tensor]:
    """Any bytes but the highest, so that 16-bit scales are finite."""
    found: dict[str, Tensor] = {}
    for name, kind in BLOCKS.items():
        row_bytes = kernels.blocks.packed_bytes(64, 1024, kind) // 64
        rows_OB = torch.randint(0, 120, (83, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(kind))
        packed = torch.zeros(kernels.blocks.packed_bytes(83, 1024, kind), dtype=torch.uint8)
        kernels.blocks.pack(rows_OB, packed, 0, 1024, kind)
        found[f"blocks_product {name}"] = kernels.blocks.product(x_TI, packed, bias_O, 83, kind)
        found[f"blocks_rows {name}"] = kernels.blocks.rows(packed, torch.arange(83), (83, 1024), kind)
    return found


def _rows(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    x_TE, gates_TE = normal(10, 9, 250), normal(11, 9, 500) * 4
    found = {"rms_norm": kernels.rows.rms_norm(x_TE, normal(12, 250), 1e-6, 1.0)}
    for name in ("silu", "gelu", "gelu_tanh", "quick_gelu", "relu", "sigmoid"):
        found[name] = kernels.rows.activate(x_TE, name)
        found[f"{name} gate"] = kernels.rows.activate_gate(gates_TE, name)
    for dtype in (torch.float32, torch.int8):
        levels_TE, scale_T1 = kernels.rows.quantize_rows(x_TE, dtype)
        found |= {f"quantize_rows {dtype}": levels_TE, f"scales {dtype}": scale_T1}
    return found


def _rotated(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    frequencies_R = torch.tensor([10.0 ** (-4 * n / 19) for n in range(20)]).repeat(2)
    cos_T1R, sin_T1R = kernels.rotation.angles(torch.arange(9) * 700, frequencies_R, False, 1.5)
    angles = Angles(normal(13, 9, 1, 40), normal(14, 9, 1, 40), False)
    qkv_TC, pages_NC = normal(15, 9, 8 * 50), torch.zeros(20, 4 * 50, dtype=torch.float16)
    kernels.rotation.rotate_and_store(qkv_TC[:, :300].view(9, 6, 50), angles, qkv_TC[:, 200:], pages_NC, torch.arange(9) * 2)
    return {"rotary_angles": torch.cat((cos_T1R, sin_T1R)), "rotate": qkv_TC, "store": pages_NC}


def _delta(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    columns = ([0, 2, 3], [0, 5, 21], [5, 16, 1], [4, 0, 1], [0, 2, 3])
    runs, sizes = SlotRuns(*map(torch.tensor, columns)), SlotSizes(2 * 2 * 36 + 4 * 75, 4, 2, 4, 36, 75)
    slots_NW, weights_4F = normal(40, 5, 3 * sizes.num_channels + 4 * 36 * 75), normal(41, 4, sizes.num_channels)
    mixed_TF = kernels.tails.convolve(normal(42, 22, sizes.num_channels), (weights_4F, None), slots_NW, runs, sizes)
    heads = (normal(43, 4), normal(44, 4), normal(45, 75), 1e-6)
    rows = (mixed_TF, normal(46, 22, 8), normal(47, 22, 300))
    out_T = kernels.delta.rule(*rows, heads, slots_NW=slots_NW, runs=runs, sizes=sizes, tiled=False)
    return {"delta_convolve": mixed_TF, "delta_rule": out_T, "delta_rule slots": slots_NW}


def _mamba(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    columns = ([0, 2, 3], [0, 5, 21], [5, 16, 1], [4, 0, 1], [0, 2, 3])
    runs, sizes = SlotRuns(*map(torch.tensor, columns)), SlotSizes(6 * 75 + 2 * 2 * 37, 4, 2, 6, 37, 75)
    slots_NW, weights_4F = normal(50, 5, 3 * sizes.num_channels + 6 * 37 * 75), normal(51, 4, sizes.num_channels)
    weights = (weights_4F, normal(52, sizes.num_channels))
    mixed_TF = kernels.tails.convolve(normal(53, 22, sizes.num_channels), weights, slots_NW, runs, sizes)
    heads, gate_T = MambaHeads(normal(54, 6), normal(55, 6), normal(56, 6), (0.1, 2.0)), normal(57, 22, 450)
    rows = (mixed_TF, normal(58, 22, 9)[:, :6], gate_T)
    out_T = kernels.mamba.scan(*rows, heads, slots_NW=slots_NW, runs=runs, sizes=sizes)
    squares_TG = kernels.mamba.squares(out_T, 2)
    normed_T = kernels.mamba.norm(out_T.clone(), squares_TG, GroupScales(normal(59, 450), 300, 1e-5), gate_T)
    scanned = {"mamba_convolve": mixed_TF, "mamba_scan": out_T, "mamba_scan slots": slots_NW}
    return scanned | {"mamba_norm squares": squares_TG, "mamba_norm": normed_T}


def _attended(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    new_S, length_S, rows_S = torch.tensor([1, 7, 40]), torch.tensor([300, 7, 90]), torch.tensor([0, 1, 8])
    tables_SB = torch.randperm(57, generator=torch.Generator().manual_seed(16)).view(3, 19)
    keys = PagedKeys(rows_S, new_S, tables_SB, length_S, 16, window=70, bias_HP=normal(17, 6, 304))
    found = {}
    for dtype in (torch.float32, torch.float16):
        pages_NC, out_TKGD = normal(18, 57 * 16, 2 * 2 * 20).to(dtype), torch.zeros(48, 2, 3, 20)
        kernels.attention.attend(normal(19, 48, 2, 3, 20), pages_NC, keys, (0.3, 20.0), out_TKGD)
        found[f"attend {dtype}"] = out_TKGD
    return found


def _attended_cold(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    new_S, length_S, all_M = torch.tensor([1, 40]), torch.tensor([300, 90]), torch.arange(19)
    pages_NC, found = normal(21, 19 * 16, 2 * 2 * 20), {}
    for kind in (FP8, INT8, FP8_VALUES, CHANNELS):
        layout = ColdLayout(kind, 2, 20)
        cold_BX = torch.zeros(19, layout.block_bytes, dtype=torch.uint8)
        kernels.attention.seal(pages_NC, all_M, cold_BX, all_M.flip(0), layout)
        cold = ColdKeys(all_M.flip(0).expand(2, -1).contiguous(), layout, 20)
        keys = PagedKeys(torch.tensor([0, 1]), new_S, all_M.expand(2, -1).contiguous(), length_S, 16, window=200, cold=cold)
        out_TKGD, lse_TKG = torch.zeros(41, 2, 3, 20), torch.zeros(41, 2, 3)
        kernels.attention.attend(
            normal(22, 41, 2, 3, 20), pages_NC, keys, (0.3, None), out_TKGD, cold_BX=cold_BX, lse_TKG=lse_TKG
        )
        found |= {f"seal {kind}": cold_BX, f"attend {kind}": out_TKGD, f"lse {kind}": lse_TKG}
    return found


def _attended_parts(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    """More keys than a part has, of one sequence alone and of many tokens."""
    found, all_M = {}, torch.arange(50)
    pages_NC, layout = normal(23, 50 * 16, 2 * 2 * 24), ColdLayout(CHANNELS, 2, 24)
    cold_BX = torch.zeros(50, layout.block_bytes, dtype=torch.uint8)
    kernels.attention.seal(pages_NC, all_M, cold_BX, all_M, layout)
    for new in (1, 30):
        for name, cold in (("hot", None), ("cold", ColdKeys(all_M[None], layout, 20))):
            keys = PagedKeys(torch.tensor([0]), torch.tensor([new]), all_M[None], torch.tensor([790]), 16, cold=cold)
            out_TKGD = torch.zeros(new, 2, 3, 24)
            kernels.attention.attend(
                normal(24, new, 2, 3, 24),
                pages_NC,
                keys,
                (0.3, None),
                out_TKGD,
                cold_BX=None if cold is None else cold_BX,
            )
            found[f"attend parts {name} {new}"] = out_TKGD
    return found


def _drawn(kernels: NativeKernels, normal: Normal) -> dict[str, Tensor]:
    logits_SV = normal(20, 4, 5000) * 3
    draws = [Draw(s % 4, 45, 50 * (s % 3), 0, 1.0, (1.0, 0.9)[s % 2], (s + 0.5) / 40) for s in range(40)]
    best_S, token_S = kernels.sampling.greatest(logits_SV)
    allowed_SW = torch.arange(4 * 157, dtype=torch.int32).view(4, 157) * 2_654_435
    return {
        "restrict": kernels.sampling.restrict(logits_SV, allowed_SW),
        "greatest": best_S,
        "greatest's token": token_S,
        "draw": kernels.sampling.draw(logits_SV, draws),
    }
