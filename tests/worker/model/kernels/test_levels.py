"""Which level a CPU has, and that each level's library computes what the one compiled for this machine does."""

import hashlib
import platform
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from ryzanstein.worker.kernels import REVISION
from ryzanstein.worker.kernels.compilers import NotBuilt
from ryzanstein.worker.kernels.levels import LEVELS, ProcessorLevel, best_level, chosen_level, levels_of
from ryzanstein.worker.kernels.native import NativeKernels
from ryzanstein.worker.kernels.openmp import share_openmp

# The features of real processors that programs can use: what the kernel itself needs is left out.
SANDY_BRIDGE = [
    "fpu",
    "cx8",
    "cmov",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "ht",
    "syscall",
    "nx",
    "rdtscp",
    "lm",
    "pni",
    "pclmulqdq",
    "ssse3",
    "cx16",
    "sse4_1",
    "sse4_2",
    "x2apic",
    "popcnt",
    "aes",
    "xsave",
    "avx",
    "lahf_lm",
    "xsaveopt",
]
HASWELL = [
    *SANDY_BRIDGE,
    *["fma", "movbe", "f16c", "rdrand", "abm", "fsgsbase", "bmi1", "avx2", "smep", "bmi2", "erms", "invpcid"],
]
SKYLAKE_SERVER = [*HASWELL, *["rdseed", "adx", "clflushopt", "clwb", "avx512f", "avx512dq", "avx512cd", "avx512bw", "avx512vl"]]
CASCADE_LAKE = [*SKYLAKE_SERVER, "avx512_vnni"]
KNIGHTS_LANDING = [*HASWELL, *["avx512f", "avx512pf", "avx512er", "avx512cd"]]
ALDER_LAKE = [*HASWELL, *["adx", "sha_ni", "avx_vnni", "vaes", "vpclmulqdq", "gfni"]]
ZEN_3 = [
    "fpu",
    "vme",
    "de",
    "pse",
    "tsc",
    "msr",
    "pae",
    "mce",
    "cx8",
    "apic",
    "sep",
    "mtrr",
    "pge",
    "mca",
    "cmov",
    "pat",
    "pse36",
    "clflush",
    "mmx",
    "fxsr",
    "sse",
    "sse2",
    "ht",
    "syscall",
    "nx",
    "mmxext",
    "fxsr_opt",
    "pdpe1gb",
    "rdtscp",
    "lm",
    "constant_tsc",
    "rep_good",
    "nopl",
    "pni",
    "pclmulqdq",
    "ssse3",
    "fma",
    "cx16",
    "pcid",
    "sse4_1",
    "sse4_2",
    "x2apic",
    "movbe",
    "popcnt",
    "aes",
    "xsave",
    "avx",
    "f16c",
    "rdrand",
    "lahf_lm",
    "cmp_legacy",
    "cr8_legacy",
    "abm",
    "sse4a",
    "misalignsse",
    "3dnowprefetch",
    "osvw",
    "topoext",
    "fsgsbase",
    "bmi1",
    "avx2",
    "smep",
    "bmi2",
    "erms",
    "invpcid",
    "rdseed",
    "adx",
    "smap",
    "clflushopt",
    "clwb",
    "sha_ni",
    "xsaveopt",
    "vaes",
    "vpclmulqdq",
    "rdpid",
    "fsrm",
]
ZEN_4 = [
    *ZEN_3,
    *[
        "avx512f",
        "avx512dq",
        "avx512cd",
        "avx512bw",
        "avx512vl",
        "avx512_vbmi2",
        "gfni",
        "avx512_vnni",
        "avx512_bitalg",
        "avx512_bf16",
    ],
]
RASPBERRY_PI_4 = ["fp", "asimd", "evtstrm", "crc32", "cpuid"]
GRAVITON_3 = [
    "fp",
    "asimd",
    "evtstrm",
    "aes",
    "pmull",
    "sha1",
    "sha2",
    "crc32",
    "atomics",
    "fphp",
    "asimdhp",
    "cpuid",
    "asimdrdm",
    "jscvt",
    "fcma",
    "lrcpc",
    "dcpop",
    "sha3",
    "sm3",
    "sm4",
    "asimddp",
    "sha512",
    "sve",
    "asimdfhm",
    "dit",
    "uscat",
    "ilrcpc",
    "flagm",
    "ssbs",
    "paca",
    "pacg",
    "dcpodp",
    "svei8mm",
    "svebf16",
    "i8mm",
    "bf16",
    "dgh",
    "rng",
]


def cpuinfo(*processors: list[str], machine: str = "x86_64") -> str:
    name = "flags" if machine == "x86_64" else "Features"
    return "".join(f"processor\t: {n}\n{name}\t\t: {' '.join(has)}\nbogomips\t: 50.00\n\n" for n, has in enumerate(processors))


@pytest.mark.parametrize(
    ("features", "level"),
    [
        (HASWELL, "x86-64-v3"),
        (KNIGHTS_LANDING, "x86-64-v3"),
        (ALDER_LAKE, "x86-64-v3-vnni"),
        (ZEN_3, "x86-64-v3"),
        (SKYLAKE_SERVER, "x86-64-v4"),
        (CASCADE_LAKE, "x86-64-v4-vnni"),
        (ZEN_4, "x86-64-v4-vnni"),
    ],
    ids=["Haswell", "Knights Landing", "Alder Lake", "Zen 3", "Skylake server", "Cascade Lake", "Zen 4"],
)
def test_an_x86_cpu_gets_the_best_level_that_it_has_all_of(features: list[str], level: str) -> None:
    assert best_level("x86_64", cpuinfo(features, features)).name == level


@pytest.mark.parametrize("features", [RASPBERRY_PI_4, GRAVITON_3], ids=["Raspberry Pi 4", "Graviton 3"])
def test_every_64_bit_arm_cpu_has_its_level(features: list[str]) -> None:
    assert best_level("aarch64", cpuinfo(features, machine="aarch64")).name == "aarch64"


def test_what_a_cpu_lacks_is_named() -> None:
    with pytest.raises(NotBuilt, match="the CPU lacks abm, avx2, bmi1, bmi2, f16c, fma, movbe of x86-64-v3"):
        best_level("x86_64", cpuinfo(SANDY_BRIDGE))


def test_a_feature_counts_only_if_every_processor_has_it() -> None:
    assert best_level("x86_64", cpuinfo(ZEN_4, HASWELL)).name == "x86-64-v3"


@pytest.mark.parametrize("feature", sorted(LEVELS[0].features))
def test_no_feature_of_a_level_may_be_missing(feature: str) -> None:
    """A hypervisor may hide any of them."""
    left = [name for name in ZEN_4 if name != feature]
    lower = [level.name for level in levels_of("x86_64") if level.features <= frozenset(left)]
    if lower:
        assert best_level("x86_64", cpuinfo(left)).name == lower[0]
    else:
        with pytest.raises(NotBuilt, match=f"the CPU lacks {feature} of x86-64-v3"):
            best_level("x86_64", cpuinfo(left))


@pytest.mark.parametrize("machine", ["riscv64", ""])
def test_other_architectures_have_no_level(machine: str) -> None:
    with pytest.raises(NotBuilt, match=f"no packaged library is for {machine or 'this machine'}"):
        best_level(machine, cpuinfo(ZEN_4))


def test_a_cpu_that_says_nothing_gets_nothing() -> None:
    with pytest.raises(NotBuilt, match="the CPU lacks"):
        best_level("x86_64", "")


def test_a_level_can_be_chosen_that_the_cpu_has(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen_level("x86_64", cpuinfo(ZEN_4)) is None
    monkeypatch.setenv("RYZANSTEIN_KERNELS_LEVEL", "x86-64-v3")
    chosen = chosen_level("x86_64", cpuinfo(ZEN_4))
    assert chosen is not None
    assert chosen.options == ("-march=x86-64-v3",)


@pytest.mark.parametrize(
    ("name", "reason"), [("x86-64-v4", "the CPU lacks avx512bw, .* of x86-64-v4"), ("v3", "'v3', not one of x86-64-v4-vnni, ")]
)
def test_no_other_level_can_be_chosen(name: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RYZANSTEIN_KERNELS_LEVEL", name)
    with pytest.raises(NotBuilt, match=reason):
        chosen_level("x86_64", cpuinfo(ZEN_3))


def runs_here(level: ProcessorLevel) -> bool:
    try:
        best = best_level(platform.machine(), Path("/proc/cpuinfo").read_text())
    except NotBuilt:
        return False
    return level.machine == platform.machine() and level.features <= best.features


LEVELS_HERE = levels_of(platform.machine())


@pytest.mark.parametrize(
    "level",
    [
        pytest.param(level, marks=pytest.mark.lab if level in LEVELS_HERE[1:-1] else pytest.mark.long, id=level.name)
        for level in LEVELS_HERE
    ],
)
def test_a_levels_library_has_the_bits_of_the_one_for_this_machine(
    level: ProcessorLevel,
    kernels: NativeKernels,
    results: Callable[..., dict[str, Tensor]],
    level_library: Callable[[ProcessorLevel], Path],
) -> None:
    """The library of a lower level has narrower registers: what is summed across lanes then differs by rounding."""
    path = level_library(level)
    assert b"libgomp" not in path.read_bytes()
    if not runs_here(level):
        pytest.skip(f"it compiles, but this CPU does not have {level.name}")
    share_openmp()
    packaged, compiled = results(NativeKernels(path)), results(kernels)
    same_width = ("v4" in level.name) == runs_here(LEVELS[1])
    summed_across_lanes = ("rms_norm", "float_product_unpacked", "attend", "lse", "delta_rule", "mamba_norm")
    for name, expected in compiled.items():
        if same_width or not name.startswith(summed_across_lanes):
            assert torch.equal(packaged[name], expected), name
        else:
            torch.testing.assert_close(packaged[name], expected, rtol=1e-4, atol=1e-4, msg=name)


def exact_numbers(seed: int, *shape: int) -> Tensor:
    """About normal numbers without a rounding on the way, so that every machine has the same."""
    dice = np.random.default_rng(seed).integers(-512, 513, (6, *shape))
    return torch.from_numpy((dice.sum(0) / 1024).astype(np.float32))


# Of the level that every x86-64 CPU has on which the tests run, by the revision of the kernels. When this fails because a
# kernel computes other bits, raise REVISION and put here what was found.
DIGESTS = {2: "65b415e9b9076c65"}


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the digest is of x86-64-v3")
def test_other_bits_are_another_revision(
    results: Callable[..., dict[str, Tensor]], level_library: Callable[[ProcessorLevel], Path]
) -> None:
    share_openmp()
    (level,) = (level for level in LEVELS if level.name == "x86-64-v3")
    found = results(NativeKernels(level_library(level)), exact_numbers)
    digest = hashlib.sha256()
    for name in sorted(found):
        digest.update(name.encode() + found[name].contiguous().view(torch.uint8).numpy().tobytes())
    assert DIGESTS[REVISION] == digest.hexdigest()[:16]
